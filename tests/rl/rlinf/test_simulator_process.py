# SPDX-License-Identifier: Apache-2.0
"""Simulators in a process of their own: crashes, hangs and what comes after, with real processes."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from omegaconf import OmegaConf

from embodix.simulation.process import encode
from embodix_rl.rlinf.latency_env import LatencyEnv
from embodix_rl.rlinf.rollout_episodes import EpisodeSeeds
from embodix_rl.rlinf.simulator_env import SimulatorEnv
from embodix_rl.rlinf.simulator_process import RemoteSimulators, SimulatorDeadlines, SimulatorLostError
from embodix_rl.testing.failing_environment import FailingEnvironment

DEADLINES = SimulatorDeadlines(step_s=60.0, reset_s=60.0)
PARENT = """
from embodix_rl.rlinf.simulator_process import RemoteSimulators, SimulatorDeadlines
from embodix_rl.testing.failing_environment import FailingEnvironment
remote = RemoteSimulators("env 0", SimulatorDeadlines(60.0, 60.0))
environment = remote.build(FailingEnvironment, first=0)
print(remote.pid, flush=True)
environment.chunk_step("hang")
"""


@pytest.fixture
def remote():
    simulators = RemoteSimulators("env 3", DEADLINES)
    yield simulators
    simulators.close()


def _latency_config(**declared):
    node = {"environment": "latency", "seed": 0, "state_dim": 3, "step_s": 0.0, "step_s_per_env": 0.0, "reset_s": 0.0}
    host = {"max_episode_steps": 8, "auto_reset": True, "ignore_terminations": False, "group_size": 1}
    return OmegaConf.create({**host, "embodix": {**node, **declared}})


def test_answers_are_those_of_the_environment_itself_and_declared_crashes_happen(remote):
    actions, cfg = torch.zeros(2, 4, 2), _latency_config(crash_every_steps=4)
    here = LatencyEnv(cfg, 2, 1, 2)
    there = remote.build(LatencyEnv, cfg=cfg, num_envs=2, seed_offset=1, total_num_processes=2)
    first = here.reset()[0]["states"]
    assert torch.equal(first, there.reset()[0]["states"])
    for _ in range(3):
        mine, theirs = here.chunk_step(actions), there.chunk_step(actions)
        for one, other in zip(mine[1:4], theirs[1:4], strict=True):
            assert torch.equal(one, other) and one.dtype == other.dtype
        assert torch.equal(mine[0][0]["states"], theirs[0][0]["states"])
        assert mine[4][0].keys() == theirs[4][0].keys()
    with pytest.raises(SimulatorLostError, match=r"env 3 crashed at chunk_step of its environment 0, exit code -9"):
        there.chunk_step(actions)
    here.go_on(here.progress())
    assert not torch.equal(here.reset()[0]["states"], first)


def test_tensors_travel_as_bytes():
    message = {
        "images": torch.arange(24, dtype=torch.uint8).view(2, 3, 4).permute(0, 2, 1),
        "flags": [torch.tensor(True), torch.zeros(0, 3)],
        "half": torch.ones(2, dtype=torch.bfloat16),
        "array": np.arange(3),
    }
    received = pickle.loads(encode(message))
    assert torch.equal(received["images"], message["images"])
    assert received["flags"][0].dtype == torch.bool and received["flags"][1].shape == (0, 3)
    assert torch.equal(received["half"], message["half"])
    received["images"] += 1  # it is the receiver's own


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ("crash", "crashed at chunk_step of its environment 0, exit code -9"),
        ("exit", "crashed at chunk_step of its environment 0, exit code 7"),
        ("raise", r"raised at chunk_step of its environment 0:.*IndexError: told to raise"),
    ],
)
def test_a_failure_is_told_and_other_episodes_begin_after_the_restart(remote, order, told):
    environments = [remote.build(FailingEnvironment, first=first) for first in (0, 100)]
    assert [environment.reset()[0]["episode"] for environment in environments] == [1, 101]
    before = remote.pid
    assert environments[0].chunk_step("go") == "go"
    with pytest.raises(SimulatorLostError, match=f"(?s)simulators of env 3 {told}"):
        environments[0].chunk_step(order)
    assert remote.life == 1 and remote.pid is None and not psutil.pid_exists(before)
    with pytest.raises(SimulatorLostError, match="do not run"):
        environments[1].reset()
    remote.restart()
    environments[1].is_start = False
    begun = [environment.reset()[0] for environment in environments]
    assert begun == [{"episode": 3, "is_start": True}, {"episode": 103, "is_start": False}]
    assert remote.life == 1


def test_a_hang_ends_at_the_deadline():
    remote = RemoteSimulators("env 0", SimulatorDeadlines(step_s=0.3, reset_s=60.0))
    environment = remote.build(FailingEnvironment, first=0)
    pid = remote.pid
    with pytest.raises(SimulatorLostError, match=r"hung: no answer to chunk_step .* within 0.3 s"):
        environment.chunk_step("hang")
    assert not psutil.pid_exists(pid)


def test_simulators_that_cannot_be_made_are_lost_too(remote):
    with pytest.raises(SimulatorLostError, match=r"(?s)raised at building an environment.*told to fail"):
        remote.build(FailingEnvironment, first=0, fails_at=0)
    environment = remote.build(FailingEnvironment, first=0, fails_at=1)
    with pytest.raises(SimulatorLostError):
        environment.chunk_step("crash")
    with pytest.raises(SimulatorLostError, match="told to fail while it is made"):
        remote.restart()
    assert remote.life == 3


def test_another_thread_can_end_a_call(remote):
    environment = remote.build(FailingEnvironment, first=0)
    killing = threading.Timer(0.3, remote.kill)
    killing.start()
    begun = time.monotonic()
    with pytest.raises(SimulatorLostError, match="exit code -9"):
        environment.chunk_step("hang")
    assert time.monotonic() - begun < DEADLINES.step_s
    killing.join()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux's")
def test_simulators_that_hang_end_with_a_worker_that_is_killed():
    worker = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    simulators = psutil.Process(int(worker.stdout.readline()))
    worker.send_signal(signal.SIGKILL)
    worker.communicate(timeout=20)
    psutil.wait_procs([simulators], timeout=20)
    assert not simulators.is_running()


def test_episodes_of_a_simulator_are_not_begun_again():
    before = EpisodeSeeds(5, 2, 1, 0, 2)
    begun = {before.next(env) for env in (0, 1, 0)}
    simulated = SimulatorEnv.__new__(SimulatorEnv)  # its seeds are what counts here
    simulated.seeds = EpisodeSeeds(5, 2, 1, 0, 2)
    simulated.go_on(before.num_begun)
    assert simulated.progress() == [3, 2]
    assert not begun & {simulated.seeds.next(env) for env in (0, 1)}
