# SPDX-License-Identifier: Apache-2.0
"""The engine: results by episode, whatever the workers; chunks, refill, videos, mistakes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodix.evaluation.actors import ExpertActor, ReplayActor
from embodix.evaluation.engine import Engine, EngineSettings, run_episodes, worker_of_slots
from embodix.evaluation.episodes import Episode, plan_episodes
from embodix.testing.simulators import PointSimulators

SIMULATORS = PointSimulators()
EPISODES = plan_episodes(SIMULATORS.tasks, 6, first_seed=40)


class Watched:
    """An actor that keeps which episodes were asked together."""

    def __init__(self, actor):
        self._actor, self.name, self.num_observations = actor, actor.name, actor.num_observations
        self.batches = []

    def start(self, slot, episode):
        self._actor.start(slot, episode)

    def act(self, requests):
        self.batches.append([(request.slot, request.episode, request.num_steps) for request in requests])
        return self._actor.act(requests)


@pytest.fixture(scope="module")
def run():
    def run(actor, num_workers=0, simulators=SIMULATORS, episodes=EPISODES, **settings):
        watched, order = Watched(actor), []
        settings = EngineSettings(num_workers=num_workers, **{"num_slots": 5, **settings})
        results = run_episodes(simulators, watched, episodes, settings, on_result=order.append)
        return results, order, watched.batches

    return run


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_workers_change_nothing(run, make_actor, num_workers):
    results, order, batches = run(make_actor(), num_workers)
    expected, expected_order, expected_batches = run(make_actor())
    assert results == expected
    assert order == expected_order
    assert batches == expected_batches
    assert [result.episode for result in results] == EPISODES
    lengths = {result.num_steps for result in results}
    assert len(lengths) > 3  # some in the middle of a chunk
    assert {result.success for result in results} == {True, False}


def test_slots_are_refilled_and_groups_take_turns(run, make_actor):
    results, _, batches = run(make_actor())
    slots = [{slot for slot, _, _ in batch} for batch in batches]
    assert slots[:2] == [{0, 2, 4}, {1, 3}]
    assert all(batch <= {0, 2, 4} or batch <= {1, 3} for batch in slots)
    of_slot = {}
    for batch in batches:
        for slot, episode, _ in batch:
            of_slot.setdefault(slot, {})[episode] = None
    assert sum(map(len, of_slot.values())) == len(EPISODES)
    assert max(map(len, of_slot.values())) > 1
    steps = [num_steps for batch in batches for _, episode, num_steps in batch if episode == EPISODES[0]]
    assert steps == list(range(0, results[0].num_steps, 3))


def test_one_group_and_one_slot_run_the_same_episodes(run, make_actor):
    results, _, batches = run(make_actor(), num_slots=1, num_groups=4)
    assert [batch[0][1] for batch in batches if batch[0][2] == 0] == EPISODES
    assert all(len(batch) == 1 for batch in batches)
    assert [result.episode for result in results] == EPISODES


class Homing:
    """Moves towards the centre by what it sees, in chunks of three; no batch can change its numbers."""

    name, num_observations = "homing", 1

    def start(self, slot, episode):
        assert 0 <= slot < 7

    def act(self, requests):
        places = [request.observations[-1]["agent_pos"] for request in requests]
        return [np.stack([-scale * place for scale in (3.0, 0.5, -1.0)]) for place in places]


@given(st.integers(1, 7), st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_any_slots_and_groups_run_every_episode_to_the_same_end(num_slots, num_groups, counts):
    tasks = [f"task{index}" for index in range(len(counts))]
    episodes = [Episode(task, seed) for task, count in zip(tasks, counts, strict=True) for seed in range(count)]
    simulators, seen = PointSimulators(tasks=tuple(tasks)), []
    settings = EngineSettings(num_slots=num_slots, num_groups=num_groups)
    results = run_episodes(simulators, Homing(), episodes, settings, on_result=seen.append)
    assert results == run_episodes(simulators, Homing(), episodes, EngineSettings(num_slots=1))
    assert sorted(map(repr, seen)) == sorted(map(repr, results))


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 12))
def test_the_slots_of_every_group_are_spread_over_the_workers(num_slots, num_groups, num_workers):
    num_workers = min(num_workers, num_slots)
    workers = worker_of_slots(EngineSettings(num_slots=num_slots, num_groups=num_groups), num_workers)
    assert set(workers) == set(range(num_workers))
    for group in range(num_groups):
        used = Counter(workers[group::num_groups])
        if num_workers * num_groups <= num_slots:
            assert max(used.values()) - min(used[worker] for worker in range(num_workers)) <= 1


def test_noise_and_outcome_do_not_depend_on_the_company(run, make_actor):
    together, _, _ = run(make_actor())
    alone = [run(make_actor(), episodes=[episode])[0][0] for episode in EPISODES]
    assert [result.success for result in together] == [result.success for result in alone]
    assert [result.num_steps for result in together] == [result.num_steps for result in alone]
    np.testing.assert_allclose([r.sum_reward for r in together], [r.sum_reward for r in alone], rtol=1e-5)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_expert_acts_in_the_simulator(num_workers):
    settings = EngineSettings(num_workers=num_workers)
    results = run_episodes(PointSimulators(max_steps=40), ExpertActor(), EPISODES, settings)
    assert all(result.success for result in results)
    assert [result.episode for result in results] == EPISODES
    assert results[0].instruction == "Go north"


def distance_after(actions, task, seed, num_steps):
    simulator = SIMULATORS.build(task)
    simulator.reset(seed)
    return [simulator.step(action) for action in actions[:num_steps]]


def test_a_replay_holds_its_last_action(run):
    actions = {"north": np.array([[0.1, 0.2], [0.3, -0.2]], np.float32), "south": np.zeros((1, 2), np.float32)}
    results, _, _ = run(ReplayActor(actions))
    for result in results:
        given = actions[result.episode.task]
        held = np.concatenate([given, np.repeat(given[-1:], 20, axis=0)])
        outcomes = distance_after(held, result.episode.task, result.episode.seed, result.num_steps)
        assert result.sum_reward == pytest.approx(sum(outcome.reward for outcome in outcomes))
        assert result.max_reward == max(outcome.reward for outcome in outcomes)
        assert result.num_steps == 12 or result.success


def straight_to_the_goal(episode, num_steps):
    """Actions that succeed with exactly the last one."""
    simulator = SIMULATORS.build(episode.task)
    simulator.reset(episode.seed)
    expert = []
    while True:
        expert.append(simulator.expert_action())
        if simulator.step(expert[-1]).done:
            break
    waiting = [np.zeros(2, np.float32)] * (num_steps - len(expert))
    return np.stack([*waiting, *expert])


@pytest.mark.parametrize("num_steps", [11, 12, 13])
def test_success_with_the_last_action_counts(run, num_steps):
    episode = EPISODES[0]
    ((result,), _, _) = run(ReplayActor({"north": straight_to_the_goal(episode, num_steps)}), episodes=[episode])
    assert result.success == (num_steps <= 12)
    assert result.num_steps == min(num_steps, 12)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_first_episodes_of_each_task_are_recorded(run, make_actor, tmp_path, num_workers):
    import imageio.v3 as imageio

    plain, _, _ = run(make_actor())
    results, _, _ = run(make_actor(), num_workers, videos=2, videos_dir=tmp_path / "videos")
    assert [replace(result, video=None) for result in results] == plain
    recorded = [result for result in results if result.video]
    assert [result.episode for result in recorded] == EPISODES[:2] + EPISODES[6:8]
    assert recorded[0].video == "videos/north_40.mp4"
    for result in recorded:
        assert len(imageio.imread(tmp_path / result.video)) == result.num_steps + 1


def test_runs_share_workers_and_simulators(make_actor):
    with Engine(SIMULATORS, EngineSettings(num_workers=2, num_slots=5)) as engine:
        first = engine.run(make_actor(), EPISODES)
        blind = engine.run(make_actor(blank_images=True), EPISODES[:3])
        assert engine.run(make_actor(), EPISODES) == first
        assert engine.run(make_actor(), []) == []
    assert blind != first[:3]


def test_an_engine_works_again_after_an_interruption(make_actor):
    def interrupt(result):
        raise KeyboardInterrupt

    with Engine(SIMULATORS, EngineSettings(num_workers=1, num_slots=5)) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.run(make_actor(), EPISODES, on_result=interrupt)
        results = engine.run(make_actor(), EPISODES)
    assert [result.num_repeats for result in results] == [0] * len(EPISODES)


def test_the_same_episode_may_be_asked_twice(run, make_actor):
    results, _, _ = run(make_actor(), episodes=[EPISODES[0], EPISODES[1], EPISODES[0]])
    assert results[0] == results[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_workers": -1}, "`num_workers` must be at least 0, got -1"),
        ({"num_slots": 0}, "`num_slots` must be at least 1"),
        ({"num_groups": 0}, "`num_groups` must be at least 1"),
        ({"videos": 1}, "`videos_dir` must say where the 1 videos"),
        ({"worker_timeout_s": 0.0}, "must be positive"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        EngineSettings(**changes)


def test_an_unknown_task_is_named(run, make_actor):
    with pytest.raises(ValueError, match=r"Tasks must be among \['north', 'south'\], got \['east'\]"):
        run(make_actor(), episodes=[Episode("east", 0)])


def test_actions_that_are_not_finite_are_an_error(run):
    actions = np.zeros((5, 2), np.float32)
    actions[3, 1] = np.nan
    with pytest.raises(ValueError, match="Actions must be finite; replay gave nan in north with seed 40 after 0 steps"):
        run(ReplayActor({"north": actions, "south": actions}))


def test_an_actor_without_actions_is_an_error(monkeypatch):
    monkeypatch.setattr(Homing, "act", lambda self, requests: [np.zeros((0, 2))] * len(requests))
    message = r"n at least 1; homing gave \(0, 2\) in north with seed 40 after 0 steps"
    with pytest.raises(ValueError, match=message):
        run_episodes(SIMULATORS, Homing(), EPISODES, EngineSettings(num_slots=3))


def test_a_task_without_actions_to_replay_is_named(run):
    with pytest.raises(ValueError, match="no actions to replay for 'south', only for"):
        run(ReplayActor({"north": np.zeros((5, 2), np.float32)}))
    with pytest.raises(ValueError, match=r"must be \(T, action_dim\), got \(0, 2\) for 'north'"):
        ReplayActor({"north": np.zeros((0, 2), np.float32)})
