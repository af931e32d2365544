# SPDX-License-Identifier: Apache-2.0
"""Simulators that explode, hang and are killed: the results stay what they were."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from embodix.evaluation.actors import ExpertActor, ReplayActor
from embodix.evaluation.engine import Engine, EngineSettings, SimulatorError, run_episodes
from embodix.evaluation.episodes import plan_episodes
from embodix.testing.simulators import Accident, PointSimulator, PointSimulators

EPISODES = plan_episodes(PointSimulators().tasks, 5, first_seed=40)


@pytest.fixture
def wander():
    """An actor whose chunks of four actions depend on the observation."""

    class Wander(ReplayActor):
        num_observations = 1

        def __init__(self):
            super().__init__({task: np.zeros((1, 2), np.float32) for task in PointSimulators().tasks})
            self.batches = []

        def act(self, requests):
            self.batches.append([request.episode for request in requests])
            states = [request.observations[-1]["agent_pos"] for request in requests]
            return [np.stack([-0.4 * state + 0.1 * step for step in range(4)]) for state in states]

    return Wander


@pytest.fixture
def undisturbed(wander):
    actor = wander()
    return run_episodes(PointSimulators(), actor, EPISODES, EngineSettings(num_slots=4)), actor.batches


def without_repeats(results):
    return [replace(result, num_repeats=0) for result in results]


@pytest.mark.parametrize(("kind", "num_workers"), [("raise", 0), ("raise", 2), ("kill", 1), ("kill", 2), ("hang", 2)])
def test_an_accident_costs_one_repeat_and_changes_nothing_else(wander, undisturbed, tmp_path, kind, num_workers):
    results, batches = undisturbed
    accident = Accident(kind, EPISODES[2], step=6, ledger=tmp_path)
    actor = wander()
    settings = EngineSettings(num_workers=num_workers, num_slots=4, worker_timeout_s=5.0 if kind == "hang" else 60.0)
    disturbed = run_episodes(PointSimulators(accident=accident), actor, EPISODES, settings)
    assert len(list(tmp_path.iterdir())) == 1
    assert without_repeats(disturbed) == results
    assert actor.batches == batches
    assert disturbed[2].num_repeats == 1
    assert kind != "raise" or sum(result.num_repeats for result in disturbed) == 1


def test_a_worker_killed_from_outside_changes_nothing_else(wander, undisturbed):
    results, batches = undisturbed
    actor, killed = wander(), []
    with Engine(PointSimulators(), EngineSettings(num_workers=2, num_slots=4)) as engine:

        def kill_one(result):
            if len(killed) < 2:
                worker = engine.workers.started[len(killed)]
                os.kill(worker.process.pid, signal.SIGKILL)
                killed.append(worker.process)

        disturbed = engine.run(actor, EPISODES, on_result=kill_one)
    assert [process.exit_code() for process in killed] == [-signal.SIGKILL] * 2
    assert without_repeats(disturbed) == results
    assert actor.batches == batches
    assert sum(result.num_repeats for result in disturbed) > 0


@pytest.mark.parametrize(("kind", "num_workers"), [("raise", 0), ("kill", 1)])
def test_an_episode_that_always_fails_stops_the_run_with_its_name(wander, tmp_path, kind, num_workers):
    accident = Accident(kind, EPISODES[2], step=6, ledger=tmp_path, times=99)
    settings = EngineSettings(num_workers=num_workers, num_slots=1, max_repeats=2)
    reason = "the simulator exploded" if kind == "raise" else "died with exit code -9"
    message = rf"Episode north with seed 42 failed 3 times after 8 actions, more than max_repeats=2(.|\n)*{reason}"
    with pytest.raises(SimulatorError, match=message):
        run_episodes(PointSimulators(accident=accident), wander(), EPISODES, settings)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_hanging_simulator_is_named_with_the_time_it_was_waited_for(wander, tmp_path):
    accident = Accident("hang", EPISODES[0], step=0, ledger=tmp_path, times=99)
    settings = EngineSettings(num_workers=1, num_slots=1, max_repeats=0, worker_timeout_s=3.0)
    with pytest.raises(SimulatorError, match=r"Episode north with seed 40 failed 1 times.*no answer .* for 3 s"):
        run_episodes(PointSimulators(accident=accident), wander(), EPISODES, settings)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_simulator_that_cannot_be_built_is_not_tried_again(wander, num_workers):
    simulators = PointSimulators(unbuildable=("south",))
    with pytest.raises(SimulatorError, match=r"simulator of south can't be set up:(.|\n)*assets of south are missing"):
        run_episodes(simulators, wander(), EPISODES, EngineSettings(num_workers=num_workers))


def test_a_simulator_without_an_expert_says_so():
    class WithoutExpert(PointSimulator):
        expert_action = None

    class Simulators(PointSimulators):
        def build(self, task):
            return WithoutExpert(task, self.max_steps)

    with pytest.raises(SimulatorError, match="simulator of north has no scripted controller"):
        run_episodes(Simulators(), ExpertActor(), EPISODES, EngineSettings())
