# SPDX-License-Identifier: Apache-2.0
"""Policies as actors: what upstream's own rollout does with them, controls, and nothing left behind."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.envs.configs import PushtEnv
from lerobot.envs.factory import make_env, make_env_pre_post_processors
from lerobot.envs.utils import close_envs, env_to_policy_features
from lerobot.policies.factory import make_pre_post_processors
from lerobot.scripts.lerobot_eval import rollout

from embodix.evaluation.actors import PolicyActor, Request
from embodix.evaluation.engine import EngineSettings, run_episodes
from embodix.evaluation.episodes import Episode, plan_episodes
from embodix.evaluation.noise import EpisodeNoise, episode_generator
from embodix.simulation.simulators import simulators_of
from embodix.testing.simulators import PointSimulators

SIMULATORS = PointSimulators()


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pusht():
    pytest.importorskip("gym_pusht")
    return PushtEnv(episode_length=11, observation_height=96, observation_width=96)  # what gym_pusht gives


def small_diffusion(env_cfg, **changes):
    """Upstream's diffusion policy, untrained, with two observations a chunk of four actions."""
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy

    features = env_to_policy_features(env_cfg)
    options = {"n_obs_steps": 2, "n_action_steps": 4, "horizon": 8, **changes}
    config = DiffusionConfig(
        input_features={key: ft for key, ft in features.items() if ft.type is not FeatureType.ACTION},
        output_features={"action": features["action"]},
        device="cpu", crop_shape=None, down_dims=(8, 16), n_groups=4, diffusion_step_embed_dim=8,
        spatial_softmax_num_keypoints=4, num_train_timesteps=4, **options,
    )  # fmt: skip
    torch.manual_seed(1)
    policy = DiffusionPolicy(config)
    stats = {"min": torch.zeros(2), "max": torch.full((2,), 512.0)}
    image = {"mean": torch.full((3, 1, 1), 0.5), "std": torch.full((3, 1, 1), 0.5)}
    stats_of = {"action": stats, "observation.state": stats, "observation.image": image}
    return policy, *make_pre_post_processors(config, dataset_stats=stats_of)


def upstream_rewards(env_cfg, policy, preprocessor, postprocessor, episodes):
    """Rewards (B, T) of upstream's rollout, the policy's noise drawn from each episode's own stream."""
    envs = make_env(env_cfg, n_envs=len(episodes))
    try:
        vector_env = envs[env_cfg.type][0]
        processors = make_env_pre_post_processors(env_cfg, policy.config)
        policy.eval()
        with EpisodeNoise([episode_generator(episode) for episode in episodes]):
            seeds = [episode.seed for episode in episodes]
            data = rollout(vector_env, policy, *processors, preprocessor, postprocessor, seeds=seeds)
    finally:
        close_envs(envs)
    return data["reward"].numpy()


@pytest.mark.parametrize("changes", [{}, {"n_obs_steps": 3, "n_action_steps": 2}, {"n_obs_steps": 1}])
def test_a_policy_with_a_history_acts_as_in_upstreams_rollout(pusht, changes):
    policy, *processors = small_diffusion(pusht, **changes)
    simulators = simulators_of(pusht)
    episodes = plan_episodes(simulators.tasks, 3, 100)
    rewards_BT = upstream_rewards(pusht, policy, *processors, episodes)
    actor = PolicyActor(policy, *processors, pusht)
    results = run_episodes(simulators, actor, episodes, EngineSettings(num_slots=3, num_groups=1))
    assert [result.num_steps for result in results] == [11] * 3
    # The reward's last bit differs from one PushT environment to the next.
    assert [result.sum_reward for result in results] == pytest.approx(rewards_BT.sum(axis=1).tolist(), rel=1e-12)
    assert [result.max_reward for result in results] == pytest.approx(rewards_BT.max(axis=1).tolist(), rel=1e-12)
    assert len(set(np.round(rewards_BT.sum(axis=1), 6))) == 3


@pytest.mark.slow
def test_a_history_is_the_episodes_own(pusht):
    policy, *processors = small_diffusion(pusht)
    simulators = simulators_of(pusht)
    episodes = plan_episodes(simulators.tasks, 3, 100)

    def rewards(**settings):
        actor = PolicyActor(policy, *processors, pusht)
        return [result.sum_reward for result in run_episodes(simulators, actor, episodes, EngineSettings(**settings))]

    expected = rewards(num_slots=2)
    assert rewards(num_slots=2, num_workers=1) == pytest.approx(expected, rel=1e-12)
    assert rewards(num_slots=1) == pytest.approx(expected, rel=1e-4)


def request(seed=3, num_steps=0):
    simulator = SIMULATORS.build("north")
    simulator.reset(seed)
    return Request(0, Episode("north", seed), num_steps, "Go north", (simulator.observe(),))


def test_a_chunk_is_cut_to_the_steps_that_are_executed(make_actor, seeing_policy):
    actor = make_actor(seeing_policy(n_action_steps=2))
    actor.start(0, request().episode)
    (actions,) = actor.act([request()])
    assert actions.shape == (2, 2)
    assert actions.dtype == np.float32


def test_blank_images_are_mid_grey_and_the_rest_is_kept(make_actor, seeing_policy):
    policies = [seeing_policy(), seeing_policy()]
    for policy, blank in zip(policies, (False, True), strict=True):
        actor = make_actor(policy, blank_images=blank)
        actor.start(0, request().episode)
        actor.act([request()])
    (seen,), (blank,) = (policy.seen for policy in policies)
    assert torch.equal(blank["observation.images.front"], torch.full((1, 3, 16, 16), 0.5))
    assert float(seen["observation.images.front"].std()) > 0
    assert torch.equal(blank["observation.state"], seen["observation.state"])
    assert blank["task"] == seen["task"] == ["Go north"]


def test_another_instruction_can_be_given(make_actor, seeing_policy):
    policy = seeing_policy()
    actor = make_actor(policy, instruction_of=lambda task: f"Do not go {task}", name="wrong prompt")
    actor.start(0, request().episode)
    actor.act([request()])
    assert policy.seen[0]["task"] == ["Do not go north"]
    assert actor.name == "wrong prompt"


def test_nothing_is_left_behind_in_the_policy_or_the_random_stream(make_actor, seeing_policy):
    policy = seeing_policy()
    policy.train()
    policy.network[0].eval()  # a frozen part
    modes = [module.training for module in policy.modules()]
    actor = make_actor(policy)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    actor.start(0, request().episode)
    chunks = [actor.act([request()])[0] for _ in range(2)]
    assert not np.array_equal(*chunks)  # the episode's stream goes on
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in policy.modules()] == modes
    actor.start(0, request().episode)
    assert np.array_equal(actor.act([request()])[0], chunks[0])  # in evaluation mode: no dropout


def test_noise_for_no_row_in_particular_is_the_same_every_time(make_actor, seeing_policy):
    class Shaking(seeing_policy):
        def predict_action_chunk(self, batch):
            return super().predict_action_chunk(batch) + torch.randint(0, 100, (1, 1, 2))

    actor = make_actor(Shaking())
    chunks = []
    for seed, num_steps in [(3, 0), (3, 0), (3, 3)]:
        actor.start(0, request(seed).episode)
        chunks.append(actor.act([request(seed, num_steps)])[0])
    assert np.array_equal(chunks[0], chunks[1])
    assert not np.array_equal(chunks[0], chunks[2])


def test_temporal_ensembling_is_refused_with_the_reason():
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy

    config = ACTConfig(
        input_features={"observation.state": PolicyFeature(FeatureType.STATE, (2,)),
                        "observation.environment_state": PolicyFeature(FeatureType.ENV, (2,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (2,))},
        device="cpu", chunk_size=4, n_action_steps=1, temporal_ensemble_coeff=0.01, dim_model=16, n_heads=2,
        dim_feedforward=16, use_vae=False,
    )  # fmt: skip
    policy = ACTPolicy(config)
    with pytest.raises(ValueError, match=r"averages overlapping chunks over time \(temporal_ensemble_coeff=0.01\)"):
        PolicyActor(policy, None, None, PushtEnv())
    policy.config.temporal_ensemble_coeff = None
    PolicyActor(policy, None, None, PushtEnv())


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"config": SimpleNamespace(device="cpu")}, "must have n_action_steps in its config"),
        ({"config": SimpleNamespace(n_action_steps=2, n_obs_steps=2)}, "wants n_obs_steps=2 observations and keeps"),
        (
            {"config": SimpleNamespace(n_action_steps=2, rtc_config=SimpleNamespace(enabled=True))},
            "set rtc_config=null",
        ),
        ({"_prev_mean": None}, "plans from its previous plan"),
    ],
)
def test_policies_that_cannot_be_asked_in_changing_batches_are_refused(seeing_policy, attributes, message):
    policy = seeing_policy()
    vars(policy).update(attributes)
    with pytest.raises(ValueError, match=message):
        PolicyActor(policy, None, None, PushtEnv())
