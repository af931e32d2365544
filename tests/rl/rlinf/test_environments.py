# SPDX-License-Identifier: Apache-2.0
"""embodix's environments behind RLinf's interface, without RLinf."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from embodix.testing.simulators import IMAGE_SIZE, PointSimulators
from embodix_rl.rlinf import latency_env
from embodix_rl.rlinf.latency_env import LatencyEnv
from embodix_rl.rlinf.observations import cameras_of, from_host, to_host
from embodix_rl.rlinf.simulator_env import RewardRule, SimulatorEnv
from embodix_rl.rlinf.task_config import environment_class

MAX_STEPS = 12


def _config(**changes):
    node = {
        "max_episode_steps": MAX_STEPS,
        "auto_reset": True,
        "ignore_terminations": False,
        "group_size": 1,
        "use_fixed_reset_state_ids": False,
        "embodix": {
            "environment": "simulators",
            "seed": 5,
            "reward": {"source": "success", "scale": 2.0, "step_cost": 0.0, "success_bonus": 0.0},
        },
    }
    return OmegaConf.merge(node, changes)


def _simulated(num_envs=2, place=0, num_places=1, **changes):
    return SimulatorEnv(_config(**changes), num_envs, place, num_places, simulators=PointSimulators())


def _expert_chunk(env, num_steps):
    """Actions of the scripted controller; after the goal is reached the simulator is not stepped any more."""
    actions = np.zeros((env.num_envs, num_steps, 2), np.float32)
    for place, simulator in enumerate(env.simulators):
        point = simulator._point.copy()
        for step in range(num_steps):
            actions[place, step] = np.clip((simulator._goal - point) / 0.2, -1, 1)
            point = point + 0.2 * actions[place, step]
    return actions


def test_observations_travel_unchanged():
    cameras = ["observation.images.front", "observation.images.wrist", "observation.images.a", "observation.images.b"]
    pixels = torch.arange(256, dtype=torch.float32).repeat(3 * 3 * 2).view(2, 3, 48, 16) / 255
    observation = {camera: pixels.roll(shift, dims=3) for shift, camera in enumerate(cameras)}
    observation["observation.state"] = torch.randn(2, 4)
    assert cameras_of(observation) == cameras
    for number in range(1, 5):
        travelled = from_host(to_host(observation, cameras[:number], ["go", "stay"]), cameras[:number])
        assert travelled.pop("task") == ["go", "stay"]
        assert list(travelled) == [*cameras[:number], "observation.state"]
        assert all(torch.equal(travelled[key], observation[key]) for key in travelled)
    observation[cameras[3]] = torch.zeros(2, 3, 8, 8)
    with pytest.raises(ValueError, match=r"need one size; got .*'observation.images.b': \(8, 8\)"):
        to_host(observation, cameras, ["go", "stay"])


def test_simulators_keep_to_the_host_interface():
    env = _simulated()
    observation, infos = env.reset()
    assert infos == {} and env.is_start is False
    assert observation["main_images"].shape == (2, IMAGE_SIZE, IMAGE_SIZE, 3)
    assert observation["main_images"].dtype == torch.uint8
    assert observation["states"].shape == (2, 2)
    assert observation["task_descriptions"] == ["Go north", "Go south"]
    observations, rewards, terminations, truncations, infos_list = env.chunk_step(torch.zeros(2, 3, 2))
    assert len(observations) == len(infos_list) == 1
    assert rewards.shape == terminations.shape == truncations.shape == (2, 3)
    assert not rewards.any() and not terminations.any() and not truncations.any()
    assert infos_list[0]["episode"]["episode_len"].tolist() == [3, 3]


def test_success_ends_an_episode_and_the_next_begins_with_the_last_observation_in_infos():
    env = _simulated()
    first, _ = env.reset()
    rewards = torch.zeros(2, 0)
    for _ in range(MAX_STEPS // 3):
        observations, chunk, terminations, truncations, infos = env.chunk_step(_expert_chunk(env, 3))
        rewards = torch.cat([rewards, chunk], dim=1)
        if terminations.any():
            break
    (done,) = np.flatnonzero(terminations[:, -1].numpy())[:1]
    info = infos[0]
    assert not terminations[:, :-1].any() and not truncations.any()
    assert rewards[done].sum() == 2.0  # the scaled reward, once
    assert bool(info["final_info"]["episode"]["success_once"][done])
    assert info["final_info"]["episode"]["return"][done] == 2.0
    assert info["_final_observation"][done]
    assert not torch.equal(info["final_observation"]["states"][done], observations[0]["states"][done])
    assert env.statistics.num_steps[done] == 0
    assert first["states"][done].tolist() != observations[0]["states"][done].tolist()


def test_actions_after_the_end_of_an_episode_are_not_executed():
    env = _simulated(max_episode_steps=4)
    env.reset()
    executed = []
    for simulator in env.simulators:
        step = simulator.step
        simulator.step = lambda action, step=step: executed.append(1) or step(action)
    _, _, _, truncations, infos = env.chunk_step(np.zeros((2, 6, 2)))
    assert len(executed) == 8
    assert truncations.tolist() == [[False] * 5 + [True]] * 2
    assert infos[0]["final_info"]["episode"]["episode_len"].tolist() == [4, 4]


def test_without_auto_reset_a_finished_episode_waits_for_the_reset():
    env = _simulated(auto_reset=False, max_episode_steps=4)
    env.reset()
    _, _, terminations, truncations, infos = env.chunk_step(np.zeros((2, 3, 2)))
    assert not (terminations | truncations).any()
    _, _, terminations, truncations, infos = env.chunk_step(np.zeros((2, 3, 2)))
    assert truncations.tolist() == [[True, False, False]] * 2  # where it happened: RLinf masks what follows
    assert "final_info" not in infos[0]
    _, rewards, terminations, _, infos = env.chunk_step(np.ones((2, 3, 2)))
    assert terminations.all() and not rewards.any()
    assert infos[0]["episode"]["episode_len"].tolist() == [4, 4]
    env.reset()
    _, _, terminations, truncations, _ = env.chunk_step(np.zeros((2, 3, 2)))
    assert not (terminations | truncations).any()


def test_the_end_of_one_episode_touches_no_other_environment():
    """Episodes end at different times; each environment is what it is alone, to the bit."""
    dense = {"embodix": {"reward": {"source": "reward", "scale": 1.0, "step_cost": 0.0, "success_bonus": 0.0}}}
    together = _simulated(num_envs=3, **dense)
    alone = [_simulated(num_envs=1, place=place, num_places=3, **dense) for place in range(3)]
    _assert_rows_equal(together.reset(), [env.reset() for env in alone])
    ended = []
    for number in range(30):
        actions = _expert_chunk(together, 2)
        actions[number % 3] *= 0.3  # some are slower, so that episodes end apart
        found = together.chunk_step(actions)
        _assert_rows_equal(found, [env.chunk_step(actions[place : place + 1]) for place, env in enumerate(alone)])
        ended.append((found[2] | found[3]).any(dim=1).tolist())
    apart = [row for row in ended if any(row) and not all(row)]
    assert len(apart) >= 5
    assert all(any(row[place] for row in ended) for place in range(3))


def _assert_rows_equal(together, alone):
    """What a call gave for all environments, and for each alone; what only an end brings may be missing alone."""
    if isinstance(together, torch.Tensor):
        assert torch.equal(together, torch.cat(alone))
    elif isinstance(together, dict):
        for key, value in together.items():
            _assert_rows_equal(value, [one[key] for one in alone]) if all(key in one for one in alone) else None
    elif isinstance(together, (list, tuple)) and together and not isinstance(together[0], str):
        for place, value in enumerate(together):
            _assert_rows_equal(value, [one[place] for one in alone])
    elif isinstance(together, list):
        assert together == [one[0] for one in alone]


def test_ignored_terminations_let_an_episode_go_on_to_its_last_step():
    ended = {}
    for ignore in (False, True):
        env = _simulated(ignore_terminations=ignore)
        env.reset()
        lengths = []
        for _ in range(2 * MAX_STEPS):
            *_, infos = env.chunk_step(_expert_chunk(env, 1))
            if "final_info" in infos[0]:
                done = infos[0]["_final_info"]
                lengths += infos[0]["final_info"]["episode"]["episode_len"][done].tolist()
        ended[ignore] = lengths
    assert set(ended[True]) == {MAX_STEPS}
    assert max(ended[False]) < MAX_STEPS


def test_groups_begin_alike_and_ranks_do_not():
    grouped = _simulated(num_envs=4, group_size=2, place=1, num_places=2).reset()[0]["states"]
    assert torch.equal(grouped[0], grouped[1]) and torch.equal(grouped[2], grouped[3])
    assert not torch.equal(grouped[0], grouped[2])
    other = _simulated(num_envs=4, group_size=2, place=0, num_places=2).reset()[0]["states"]
    assert not any(torch.equal(mine, theirs) for mine in grouped for theirs in other)


def test_fixed_seeds_begin_the_same_episodes_in_every_rollout():
    env = _simulated(use_fixed_reset_state_ids=True)
    first = env.reset()[0]["states"]
    second = env.reset()[0]["states"]
    env.update_reset_state_ids()
    assert torch.equal(env.reset()[0]["states"], first) and not torch.equal(first, second)


def test_rewards_are_of_success_of_the_simulator_or_of_progress():
    outcome = SimpleNamespace(reward=-0.3, success=True, done=True)
    assert RewardRule("success", 2.0, 0.5, 0.0).of(outcome, 0.7) == 1.5
    assert RewardRule("simulator", 2.0, 0.5, 0.0).of(outcome, 0.7) == pytest.approx(-1.1)
    assert RewardRule("progress", 2.0, 0.5, 4.0).of(outcome, 0.7) == pytest.approx(-2.0 - 0.5 + 4.0)
    assert RewardRule("progress", 2.0, 0.5, 0.0).of(outcome, None) == -0.5  # a first step has made none


def test_progress_of_an_episode_does_not_count_what_the_one_before_reached():
    reward = {"source": "progress", "scale": 1.0, "step_cost": 0.0, "success_bonus": 0.0}
    env = _simulated(num_envs=1, embodix={"reward": reward})
    env.reset()
    for _ in range(3):  # episodes in which nothing moves, each as far from its goal as it began
        _, rewards, _, truncated, _ = env.chunk_step(np.zeros((1, MAX_STEPS, 2)))
        assert truncated.any() and not rewards.any()
    assert env.seeds.num_begun == [4]


def _latency(place=0, num_envs=2, max_steps=MAX_STEPS, group_size=1, **declared):
    node = {"environment": "latency", "seed": 0, "state_dim": 3, "step_s": 0.0, "step_s_per_env": 0.0, "reset_s": 0.0}
    config = OmegaConf.create(
        {
            "max_episode_steps": max_steps,
            "auto_reset": True,
            "ignore_terminations": False,
            "group_size": group_size,
            "embodix": {**node, **declared},
        }
    )
    assert environment_class(config) is LatencyEnv
    return LatencyEnv(config, num_envs, place, 2)


def test_latency_steps_take_the_declared_time(monkeypatch):
    spent = []
    monkeypatch.setattr(latency_env, "spend", lambda seconds, begun=None: spent.append(seconds))
    env = _latency(step_s=0.03, step_s_per_env=0.01, num_envs=3, reset_s={"mean_s": 0.04}, max_steps=8)
    env.reset()
    for _ in range(2):
        env.chunk_step(np.zeros((3, 4, 2)))
    assert spent == pytest.approx([0.04, 0.06, 0.06, 0.04])  # the last for the episodes that begin again


def test_latency_steps_wait():
    env = _latency(step_s=0.05)
    env.reset()
    begun = time.perf_counter()
    env.chunk_step(np.zeros((2, 4, 2)))
    assert time.perf_counter() - begun >= 0.05


def test_latency_episodes_end_where_declared_and_reward_acting_on_the_state():
    env = _latency(max_steps=8)
    observation, _ = env.reset()
    actions = observation["states"][:, None, :1].repeat(1, 4, 2)
    _, rewards, terminations, truncations, infos = env.chunk_step(actions)
    assert rewards.tolist() == [[1.0] * 4] * 2 and not truncations.any()
    observations, _, terminations, truncations, infos = env.chunk_step(actions + 10)
    assert truncations[:, -1].all() and not terminations.any()
    assert infos[0]["final_info"]["episode"]["episode_len"].tolist() == [8, 8]
    assert infos[0]["final_info"]["episode"]["return"].tolist() == [4.0, 4.0]
    assert observations[0]["states"].shape == (2, 3)


def test_latency_of_a_rank_is_its_own():
    declared = {"step_s": {"mean_s": 1.0, "kind": "lognormal", "sigma": 0.5}}
    drawn = [_latency(place=place, **declared)._step_s.draw() for place in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_latency_environments_of_a_group_begin_alike():
    env = _latency(num_envs=4, group_size=2)
    first, second = (env.reset()[0]["states"] for _ in range(2))
    assert torch.equal(first[::2], first[1::2]) and not torch.equal(first[0], first[2])
    assert not torch.equal(first, second)


def test_unknown_environments_are_refused():
    with pytest.raises(ValueError, match=r"No environment is called 'moon'; known: latency, simulators"):
        environment_class(OmegaConf.create({"embodix": {"environment": "moon"}}))
