# SPDX-License-Identifier: Apache-2.0
"""Simulators of LeRobot's configs: MetaWorld's without torch and rendered when looked at; others through `make_env`."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
from lerobot.envs.configs import LiberoEnv, MetaworldEnv, PushtEnv

from embodix.contracts import HasExpert
from embodix.evaluation.actors import ExpertActor, ReplayActor
from embodix.evaluation.engine import EngineSettings, run_episodes
from embodix.evaluation.episodes import Episode
from embodix.simulation.simulators import simulators_of
from embodix_metaworld.environment import EmbodixMetaworldConfig
from embodix_metaworld.simulator import FRAME_SIZE, MetaWorldScene, MetaWorldSimulator, MetaWorldView
from embodix_metaworld.tasks import INSTRUCTIONS

TASK = "button-press-topdown-v3"
BUILD = """
import pickle, sys
import embodix.evaluation.episodes
simulators = pickle.loads(bytes.fromhex(sys.argv[1]))
simulator = simulators.build("reach-v3")
simulator.reset(0)
simulator.observe()
simulator.close()
print(sorted({"torch", "lerobot"} & set(sys.modules)), simulators.env_cfg, simulators.tasks)
"""


def test_a_worker_of_metaworld_imports_neither_torch_nor_lerobot():
    simulators = EmbodixMetaworldConfig(task=f"reach-v3,{TASK}", image_size=28).simulators()
    pickled = pickle.dumps(simulators).hex()
    done = subprocess.run([sys.executable, "-c", BUILD, pickled], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"[] None ('reach-v3', '{TASK}')"


def test_a_config_lists_its_tasks_and_sets():
    simulators = simulators_of(EmbodixMetaworldConfig(task="MT10,reach-v3"))
    assert len(simulators.tasks) == 10
    assert simulators.env_cfg.task == "MT10,reach-v3"
    with pytest.raises(ValueError, match="`instruction` is of one task, and `task` names 2: reach-v3, push-v3"):
        EmbodixMetaworldConfig(task="reach-v3,push-v3", instruction="Do it").simulators()


def test_the_config_decides_what_is_seen_and_said():
    config = EmbodixMetaworldConfig(
        task=TASK, cameras=["topview"], image_size=28, state=["hand_z"], episode_length=7, instruction="Press"
    )
    simulator = config.simulators().build(TASK)
    simulator.reset(3)
    observation = simulator.observe()
    simulator.close()
    assert (simulator.instruction, simulator.max_steps, simulator.fps) == ("Press", 7, 80)
    assert {camera: image.shape for camera, image in observation["pixels"].items()} == {"topview": (28, 28, 3)}
    assert observation["agent_pos"].shape == (1,)
    other = EmbodixMetaworldConfig(task="reach-v3").simulators().build("reach-v3")
    other.close()
    assert other.instruction == INSTRUCTIONS["reach-v3"]


@pytest.mark.parametrize(("num_observations", "num_rendered"), [(0, 0), (1, 3), (2, 5)])
def test_frames_that_nobody_looks_at_are_not_rendered(monkeypatch, num_observations, num_rendered):
    rendered = []
    render = MetaWorldScene.render
    monkeypatch.setattr(MetaWorldScene, "render", lambda scene: rendered.append(scene) or render(scene))
    actor = ReplayActor({TASK: np.zeros((5, 4), np.float32)})
    actor.num_observations = num_observations
    simulators = EmbodixMetaworldConfig(task=TASK, image_size=28, episode_length=12).simulators()
    (result,) = run_episodes(simulators, actor, [Episode(TASK, 0)], EngineSettings())
    assert result.num_steps == 12
    assert len(rendered) == num_rendered  # at 0, 5 and 10; with two observations also at 4 and 9


def test_watching_changes_nothing_that_the_policy_sees():
    view = MetaWorldView(image_size=28)
    plain, watched = (MetaWorldSimulator(TASK, view) for _ in range(2))
    for simulator in (plain, watched):
        simulator.reset(1)
    frame = watched.frame()
    assert frame.shape == (FRAME_SIZE, FRAME_SIZE, 3)
    assert frame.std() > 10
    for _ in range(3):
        assert plain.step(np.ones(4)) == watched.step(np.ones(4))
        watched.frame()
        for camera, image in plain.observe()["pixels"].items():
            np.testing.assert_array_equal(image, watched.observe()["pixels"][camera])
    plain.close()
    watched.close()


def test_metaworlds_expert_solves_its_task():
    assert isinstance(MetaWorldSimulator("reach-v3", MetaWorldView()), HasExpert)
    simulators = EmbodixMetaworldConfig(task="reach-v3").simulators()
    results = run_episodes(simulators, ExpertActor(), [Episode("reach-v3", seed) for seed in (1, 2)], EngineSettings())
    assert [result.success for result in results] == [True, True]
    assert len({result.num_steps for result in results}) == 2


@pytest.mark.parametrize(
    ("config", "instead"), [(MetaworldEnv(task="reach-v3"), "embodix_metaworld"), (LiberoEnv(), "embodix_libero")]
)
def test_environments_that_ignore_seeds_are_refused(config, instead):
    with pytest.raises(ValueError, match=f"env.type={config.type} ignores seeds. Use env.type={instead}"):
        simulators_of(config)


def test_any_other_environment_runs_through_upstreams_factory():
    pytest.importorskip("gym_pusht")
    simulators = simulators_of(PushtEnv(episode_length=9))
    assert simulators.tasks == ("PushT-v0",)
    with pytest.raises(ValueError, match=r"env.type=pusht has the task 'PushT-v0', got 'push-v3'"):
        simulators.build("push-v3")
    simulator = simulators.build("PushT-v0")
    simulator.reset(4)
    first = simulator.observe()
    outcomes = [simulator.step(np.array([200.0, 300.0], np.float32)) for _ in range(9)]
    assert [outcome.done for outcome in outcomes] == [False] * 8 + [True]
    assert (simulator.instruction, simulator.max_steps, simulator.fps) == ("", 9, 10)
    assert not np.array_equal(first["agent_pos"], simulator.observe()["agent_pos"])
    assert simulator.frame().dtype == np.uint8
    simulator.reset(4)
    np.testing.assert_array_equal(simulator.observe()["pixels"], first["pixels"])
    simulator.close()
