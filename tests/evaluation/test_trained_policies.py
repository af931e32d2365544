# SPDX-License-Identifier: Apache-2.0
"""Trained π0.5 and GR00T-N1.5 in MetaWorld: what upstream's rollout gives, with any workers, packed or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lerobot.envs.factory import make_env, make_env_pre_post_processors
from lerobot.envs.utils import close_envs
from lerobot.scripts.lerobot_eval import rollout

from embodix.checkpoints.model_folder import find_model
from embodix.checkpoints.policy_loading import PolicyChoices, loaded_policy
from embodix.evaluation.actors import PolicyActor
from embodix.evaluation.engine import Engine, EngineSettings, run_episodes
from embodix.evaluation.episodes import plan_episodes
from embodix.evaluation.noise import EpisodeNoise, episode_generator
from embodix.simulation.simulators import simulators_of
from embodix.testing.host_runs import train_here
from embodix_groot.testing import small_groot_run
from embodix_metaworld.environment import EmbodixMetaworldConfig
from embodix_pi05.testing import small_run

pytestmark = pytest.mark.slow
TASKS = ("reach-v3", "button-press-topdown-v3")
NUM_STEPS = 8  # not a multiple of the three that are executed of each chunk


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=[small_run, small_groot_run], ids=["pi05", "groot"])
def run_folder(request, demonstrations: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    options = ["train.steps=1", f"train.output_dir={folder}", "+plugin=embodix", "env=metaworld", "env.image_size=28"]
    return train_here(request.param(demonstrations, *options)).output_dir


@pytest.fixture(scope="module")
def env_cfg() -> EmbodixMetaworldConfig:
    return EmbodixMetaworldConfig(task=",".join(TASKS), image_size=28, episode_length=NUM_STEPS)


class KillsAWorker:
    """Kills the first of the engine's workers, which simulates one slot of each group, when it is asked again."""

    def __init__(self, actor, engine):
        self.actor, self.engine, self.num_asked = actor, engine, 0
        self.name, self.num_observations, self.start = actor.name, actor.num_observations, actor.start

    def act(self, requests):
        self.num_asked += 1
        if self.num_asked == 3:
            self.engine.workers.started[0].process.kill()
        return self.actor.act(requests)


def upstream_rewards(env_cfg, task, loaded, episodes):
    """Rewards (B, T) of upstream's rollout, the policy's noise drawn from each episode's own stream."""
    cfg = EmbodixMetaworldConfig(task=task, image_size=env_cfg.image_size, episode_length=env_cfg.episode_length)
    envs = make_env(cfg, n_envs=len(episodes))
    try:
        processors = make_env_pre_post_processors(cfg, loaded.policy.config)
        seeds = [episode.seed for episode in episodes]
        with EpisodeNoise([episode_generator(episode) for episode in episodes]):
            data = rollout(
                envs[cfg.type][0], loaded.policy, *processors, loaded.preprocessor, loaded.postprocessor, seeds=seeds
            )
    finally:
        close_envs(envs)
    return data["reward"].numpy()


def test_a_trained_policy_acts_as_in_upstreams_rollout_with_any_workers(run_folder, env_cfg, tmp_path):
    simulators = simulators_of(env_cfg)
    episodes = plan_episodes(simulators.tasks, 2, 300)
    with loaded_policy(find_model(run_folder), env_cfg, PolicyChoices()) as loaded:
        assert "predict_action_chunk" in vars(loaded.policy)  # the packed computation
        actor = PolicyActor(loaded.policy, loaded.preprocessor, loaded.postprocessor, env_cfg)
        alone = run_episodes(simulators, actor, episodes, EngineSettings(num_slots=4, num_groups=2))
        with Engine(simulators, EngineSettings(num_workers=2, num_slots=4, num_groups=2)) as engine:
            assert engine.run(actor, episodes) == alone
            disturbed = engine.run(KillsAWorker(actor, engine), episodes)
        assert [replace(result, num_repeats=0) for result in disturbed] == alone
        assert sum(result.num_repeats for result in disturbed) == 2
        recorded = EngineSettings(num_slots=4, num_groups=2, videos=1, videos_dir=tmp_path / "videos")
        watched = run_episodes(simulators, actor, episodes[:1], recorded)
        rewards = [reward for task in TASKS for reward in upstream_rewards(
            env_cfg, task, loaded, [episode for episode in episodes if episode.task == task]
        ).sum(axis=1)]  # fmt: skip
    assert [result.sum_reward for result in alone] == pytest.approx(rewards, rel=1e-5)
    assert len({round(reward, 3) for reward in rewards}) == 4
    assert {result.num_steps for result in alone} == {NUM_STEPS}
    assert watched[0].sum_reward == pytest.approx(alone[0].sum_reward, rel=1e-5)
    assert (tmp_path / str(watched[0].video)).stat().st_size > 0
    assert [result.instruction for result in alone[::2]] == ["Reach", "Press the button from the top"]
