# SPDX-License-Identifier: Apache-2.0
"""LIBERO: upstream's features and processing everywhere; upstream's bits and a solved task where it is set up."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap

import pytest
from lerobot.envs.configs import LiberoEnv as UpstreamLiberoConfig
from lerobot.envs.factory import make_env_pre_post_processors
from lerobot.envs.utils import env_to_policy_features
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.processor.env_processor import LiberoProcessorStep
from omegaconf import OmegaConf

from embodix.config.compose import compose
from embodix.training.host_config import decode_env
from embodix_libero import setup as libero_setup
from embodix_libero.environment import SUITES, EmbodixLiberoConfig, LiberoSimulators
from embodix_libero.setup import inspect_libero

PROBLEM = inspect_libero().problem
needs_libero = pytest.mark.skipif(PROBLEM is not None, reason=f"LIBERO is not set up: {PROBLEM}; run `make libero`")


def test_policies_see_what_upstreams_config_promises():
    ours, theirs = EmbodixLiberoConfig(), UpstreamLiberoConfig(observation_height=256, observation_width=256)
    assert env_to_policy_features(ours) == env_to_policy_features(theirs)
    assert ours.features_map == theirs.features_map


def test_observations_are_processed_by_upstreams_step():
    preprocessor, _ = make_env_pre_post_processors(EmbodixLiberoConfig(), PI05Config())
    assert [type(step) for step in preprocessor.steps] == [LiberoProcessorStep]


def _environment(*overrides: str) -> EmbodixLiberoConfig:
    return decode_env(OmegaConf.to_container(compose("eval", list(overrides)).env))


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_is_a_group(suite):
    cfg = _environment(f"env={suite}", "env.task_ids=[0,1]")
    assert isinstance(cfg, EmbodixLiberoConfig)
    assert (cfg.task, cfg.task_ids, cfg.render) == (suite, [0, 1], "upstream")


def test_fast_rendering_is_only_used_when_it_is_asked_for():
    assert _environment("env=libero").render == "upstream"
    assert _environment("env=libero", "render=fast").render == "fast"
    with pytest.raises(ValueError, match="cannot render 'fast'"):
        _ = EmbodixLiberoConfig(render="fast").gym_kwargs


@pytest.mark.parametrize(("wrong", "message"), [({"task": "libero_97"}, "libero_spatial"), ({"render": "x"}, "fast")])
def test_wrong_choices_name_the_right_ones(wrong, message):
    with pytest.raises(ValueError, match=message):
        EmbodixLiberoConfig(**wrong)


def test_without_set_up_the_run_stops_and_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(libero_setup, "PACKAGE", "no-such-package")
    with pytest.raises(ValueError, match="Run `make libero`"):
        EmbodixLiberoConfig().simulators()
    with pytest.raises(ValueError, match="Run `make libero`"):
        LiberoSimulators(EmbodixLiberoConfig(), ("libero_spatial/0",)).build("libero_spatial/0")


def test_the_description_reaches_worker_processes():
    simulators = LiberoSimulators(EmbodixLiberoConfig(task_ids=[3]), ("libero_spatial/3",))
    assert pickle.loads(pickle.dumps(simulators)) == simulators


def _run(script: str) -> dict:
    """In a process of its own: LIBERO keeps its OpenGL backend and its configuration for good."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
@needs_libero
def test_images_and_states_are_upstreams_to_the_bit():
    """After an episode of another seed, which must leave no trace; the task draws joints before furniture.

    Upstream goes first: it renders in whichever OpenGL context is current, which later would be ours.
    """
    compared = _run("""
        import json
        import numpy as np
        from embodix_libero.environment import EmbodixLiberoConfig
        size = dict(observation_height=64, observation_width=64)
        simulators = EmbodixLiberoConfig(task_ids=[4], **size).simulators()
        from lerobot.envs.libero import LiberoEnv, _get_suite
        upstream = LiberoEnv(
            _get_suite("libero_spatial"), 4, "libero_spatial", obs_type="pixels_agent_pos", episode_index=3, **size
        )
        actions = np.random.default_rng(0).uniform(-1, 1, (9, 7)).astype(np.float32)
        expected = [upstream.reset(seed=3)[0], *(upstream.step(action)[0] for action in actions)]
        expected_frame = upstream.render()

        def equal(left, right):
            if isinstance(left, dict):
                return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
            return left.dtype == right.dtype and np.array_equal(left, right)

        simulator = simulators.build("libero_spatial/4")
        simulator.reset(8)
        for action in actions:
            simulator.step(-action)
        simulator.reset(3)
        same = [equal(simulator.observe(), expected[0])]
        for index, action in enumerate(actions, start=1):
            simulator.step(action)
            if index % 3 == 0:
                same.append(equal(simulator.observe(), expected[index]))
        frame = simulator.frame()
        same.append(np.array_equal(frame, expected_frame))
        simulator.close()
        print(json.dumps(dict(
            same=same, blank=bool(np.ptp(frame) == 0), instruction=simulator.instruction == upstream.task_description
        )))
    """)
    assert compared == {"same": [True] * 5, "blank": False, "instruction": True}


@pytest.mark.slow
@needs_libero
def test_two_scenes_share_a_process_and_the_expert_solves_both():
    """robosuite leaves the OpenGL context current that was made last; each image must come from its own scene."""
    result = _run("""
        import json
        import numpy as np
        from embodix_libero.environment import EmbodixLiberoConfig
        size = dict(observation_height=64, observation_width=64)
        simulators = EmbodixLiberoConfig(task_ids=[0, 2], render="fast", **size).simulators()
        first, second = map(simulators.build, simulators.tasks)
        first.reset(0)
        alone = first.frame()
        second.reset(0)
        other = second.frame()
        first.reset(0)
        again = first.frame()
        successes = []
        for simulator in (first, second):
            done = False
            while not done:
                outcome = simulator.step(simulator.expert_action())
                done = outcome.done
            successes.append(outcome.success)
            simulator.close()
        print(json.dumps(dict(
            same=np.array_equal(alone, again), differs=not np.array_equal(alone, other), successes=successes
        )))
    """)
    assert result == {"same": True, "differs": True, "successes": [True, True]}
