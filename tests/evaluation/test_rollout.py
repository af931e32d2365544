# SPDX-License-Identifier: Apache-2.0
"""Evaluation by upstream's code: by seed, reproducible, with controls."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy

from embodix.data.metaworld import record_metaworld
from embodix.data.metaworld_scene import MetaWorldScene
from embodix.evaluation.controls import blind_control, mean_action_sequence
from embodix.evaluation.metaworld import EmbodixMetaworldConfig, SeededEpisode
from embodix.evaluation.rollout import Evaluation, blank_image_control, evaluate_policy
from embodix.schema.data import RecordSettings

TASK = "drawer-close-v3"  # a constant push solves it
NUM_EXECUTED = 4


class Push(PreTrainedPolicy):
    """Pushes forward when it sees a scene; stands still before blank images. Looks every `NUM_EXECUTED` steps."""

    name = "push"
    config_class = PreTrainedConfig

    def __init__(self, strength=1.0):
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(n_action_steps=NUM_EXECUTED)
        self.strength = strength
        self.seen = []

    def reset(self):
        self.step = 0

    def select_action(self, batch):
        image = batch["observation.images.front"]
        if self.step % NUM_EXECUTED == 0:
            self.sees = image.flatten(1).std(dim=1) > 0.01
            self.seen.append(image)
        self.step += 1
        push = torch.tensor([0.0, 1.0, -0.4, -1.0]) * self.strength + 0.05 * torch.randn(len(image), 4)
        return push * self.sees[:, None]

    def forward(self, batch):
        raise NotImplementedError

    predict_action_chunk = get_optim_params = forward


@pytest.fixture(scope="module")
def env():
    return EmbodixMetaworldConfig(task=TASK, cameras=["front"], image_size=32, episode_length=60)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    root = tmp_path_factory.mktemp("blind") / "dataset"
    settings = RecordSettings(
        root=str(root), tasks=(TASK,), episodes_per_task=2, cameras=("front",), image_size=16,
        num_workers=1, drift_fraction=0.0, hold_steps=2, progress=False,
    )  # fmt: skip
    return record_metaworld(settings).root


def identity(value):
    return value


def run(policy, env, **changes):
    plan = {"num_episodes": 4, "start_seed": 5000, "num_envs": 2, **changes}
    return evaluate_policy(policy, identity, identity, env, **plan)


def test_episodes_are_reported_by_seed_and_reproducible(env):
    first, again = (run(Push(), env) for _ in range(2))
    assert [episode.seed for episode in first.episodes] == [5000, 5001, 5002, 5003]
    assert first == again
    assert first.num_successes == 4
    assert all(0 < episode.num_steps <= 60 for episode in first.episodes)


def test_a_policy_that_does_nothing_fails_in_full_length(env):
    evaluation = run(Push(strength=0.0), env)
    assert evaluation.num_successes == 0
    assert {episode.num_steps for episode in evaluation.episodes} == {60}


def test_frames_that_the_policy_does_not_look_at_change_nothing(env, monkeypatch):
    sparse = Push()
    outcome = run(sparse, env, num_envs=1, num_episodes=1)
    from embodix.evaluation import rollout

    monkeypatch.setattr(rollout, "replace", lambda config, **changes: config)
    dense = Push()
    assert run(dense, env, num_envs=1, num_episodes=1) == outcome
    assert all(torch.equal(left, right) for left, right in zip(sparse.seen, dense.seen, strict=True))


def test_the_blank_image_control_blinds_the_policy(env):
    control = blank_image_control(Push(), identity, identity, env, num_episodes=2, start_seed=5000, num_envs=2)
    assert control.num_successes == 0


def test_the_blind_control_replays_the_mean_demonstration(recording, env):
    control = blind_control(recording, env, num_episodes=3, start_seed=5000)
    assert [episode.seed for episode in control.episodes] == [5000, 5001, 5002]
    actions = mean_action_sequence(recording, TASK, 60)
    scene = MetaWorldScene(TASK, ("front",), 16)
    scene.reset(5001)
    assert any(scene.step(action)[2] for action in actions) == control.episodes[1].success
    scene.close()


def test_the_mean_demonstration_holds_last_actions(recording):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("embodix/metaworld", root=recording)
    lasts = [dataset[int(end) - 1]["action"].numpy() for end in dataset.meta.episodes["dataset_to_index"]]
    actions = mean_action_sequence(recording, TASK, 150)
    assert actions.shape == (150, 4)
    np.testing.assert_allclose(actions[-1], np.mean(lasts, axis=0), atol=1e-6)


def test_a_control_of_another_task_is_an_error(recording):
    with pytest.raises(ValueError, match="no demonstration of 'reach-v3'"):
        mean_action_sequence(recording, "reach-v3", 10)


def test_success_where_the_control_fails():
    mine = Evaluation("policy", TASK, tuple(SeededEpisode(seed, seed != 3, 10) for seed in range(4)))
    control = Evaluation("blind", TASK, tuple(SeededEpisode(seed, seed < 1, 10) for seed in range(4)))
    assert mine.success_where_fails(control) == (2, 3)
    elsewhere = Evaluation("blind", TASK, (SeededEpisode(9, True, 10),))
    with pytest.raises(ValueError, match="same seeds"):
        mine.success_where_fails(elsewhere)


def test_results_are_json():
    evaluation = Evaluation("policy", TASK, (SeededEpisode(1, True, 10), SeededEpisode(2, False, 60)))
    record = json.loads(json.dumps(evaluation.to_json()))
    assert record["success_rate"] == 0.5
    assert record["episodes"][1] == {"seed": 2, "success": False, "num_steps": 60}


def test_episodes_must_fill_the_environments(env):
    with pytest.raises(ValueError, match="positive multiple of num_envs=2, got 3"):
        run(Push(), env, num_episodes=3)
