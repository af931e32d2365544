# SPDX-License-Identifier: Apache-2.0
"""PPO and GRPO with the flow's log-probabilities raise the reward of a small flow on a bandit with observations."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from embodix.policies.flow_host import FlowSizes, RecomputedSteps
from embodix_rl.flow.chain import ChainSettings
from embodix_rl.flow.flow_policy import FlowPolicy, ValueSettings
from embodix_rl.objectives.objective import ObjectiveSettings, SampledChunks, ValueLossSettings
from embodix_rl.rlinf.asynchronous.version_update import MiniBatches, ShardSamples, StreamedUpdate
from embodix_rl.scheduling.streamer import Scale

SIZES = FlowSizes(4, num_predicted=2, num_executed=1, padded_dims=2, action_dims=2, prefix_width=2, action_width=32)
GROUP = 8


class SmallFlow(nn.Module):
    """A velocity field in a few layers; the observation is two numbers, the action chunk two steps of two."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2 + 4 + 1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.out = nn.Linear(32, 4)

    def forward(self, observation, x, step):
        features = self.body(torch.cat([observation, x.flatten(1), step[:, None] / SIZES.num_denoising], dim=1))
        return self.out(features).view_as(x), features


class Host:
    """`SmallFlow` as `FlowPolicy` asks for it."""

    sizes, device = SIZES, torch.device("cpu")

    def __init__(self, flow):
        self.flow = flow

    def batch_size(self, batch):
        return batch["observation"].shape[0]

    def observe(self, batch):
        return Observed(self.flow, batch["observation"])

    def recompute(self, batch, x, steps):
        observation = batch["observation"].repeat_interleave(steps.shape[1], dim=0)
        velocity, features = self.flow(observation, x.flatten(0, 1), steps.flatten())
        return RecomputedSteps(velocity.view_as(x), features.unflatten(0, steps.shape), batch["observation"])

    def pack_observation(self, batch):
        return dict(batch)

    unpack_observation = pack_observation


class Observed:
    noise_dtype = torch.float32

    def __init__(self, flow, observation):
        self.flow, self.observation = flow, observation

    def initial_noise(self):
        return torch.randn(self.observation.shape[0], SIZES.num_predicted, SIZES.padded_dims)

    @torch.no_grad()
    def step(self, x, step):
        return self.flow(self.observation, x, step)

    def prefix_features(self):
        return self.observation


def rewards_of(observation, actions):
    """Largest where the executed action is the observation turned by a right angle."""
    wanted = torch.stack([-observation[:, 1], observation[:, 0]], dim=1)
    return -(actions[:, 0] - wanted).square().sum(dim=1)


def observations(seed, num_different, repeats=1):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.rand(num_different, 2, generator=generator) - 1).repeat_interleave(repeats, dim=0)


def updates(policy, is_ppo):
    """What trains a version: four epochs of mini-batches of 64 chunks."""
    parameters = [
        {"params": list(policy.policy.parameters()), "lr": 5e-3},
        {"params": list(policy.value_head.parameters()) if is_ppo else [], "lr": 1e-2},
    ]
    optimizer = torch.optim.Adam(parameters)

    def evaluate(inputs):
        again = policy.evaluate(inputs)
        return {"logprobs": again.log_probs, "entropy": again.entropy, "values": again.values}

    def step():
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {}

    objective = ObjectiveSettings(value=ValueLossSettings() if is_ppo else None)
    gradient = StreamedUpdate(evaluate, objective, micro_batch=64)
    return MiniBatches(gradient, policy.parameters, step, evaluate, micro_batch=64, size=64, epochs=4, seed=1)


def learn(algorithm, *, stochastic="one", lag=0, iterations=25, mutation=1.0):
    """Mean reward of the deterministic policy before and after; samples are ``lag`` versions old."""
    torch.manual_seed(0)
    flow, is_ppo = SmallFlow(), algorithm == "ppo"
    value = ValueSettings(hidden_sizes=(32,)) if is_ppo else None
    policy = FlowPolicy(flow, Host(flow), ChainSettings(noise_level=0.5, stochastic_steps=stochastic), value)
    update, generator = updates(policy, is_ppo), torch.Generator().manual_seed(1)
    before, sampled_by = score(policy), [copy.deepcopy(policy)]
    for version in range(iterations):
        batch = {"observation": observations(version, 24, GROUP)}
        behaviour = sampled_by[max(0, len(sampled_by) - 1 - lag)]
        rollout = behaviour.sample(batch, generator=generator)
        rewards = mutation * rewards_of(batch["observation"], rollout.actions)
        valid = torch.ones(rewards.shape, dtype=torch.bool)
        if is_ppo:
            advantages = rewards - rollout.values
            sampled = SampledChunks(rollout.log_probs, advantages, valid, rewards, rollout.values)
            scale = Scale(float(advantages.mean()), float(advantages.std()) + 1e-5)
        else:
            of_group = rewards.view(24, GROUP)
            compared = (of_group - of_group.mean(1, keepdim=True)) / (of_group.std(1, keepdim=True) + 1e-6)
            sampled, scale = SampledChunks(rollout.log_probs, compared.flatten(), valid), Scale()
        samples = ShardSamples(rollout.forward_inputs, sampled, valid, num_steps=1)
        update.prepare(samples)
        update.train(samples, scale)
        update.finish()
        sampled_by = [*sampled_by[-lag:], copy.deepcopy(policy)] if lag else [policy]
    return before, score(policy)


def score(policy):
    """The reward of what the host would do: the ODE from noise."""
    batch = {"observation": observations(10**6, 512)}
    actions = policy.sample(batch, mode="eval", generator=torch.Generator().manual_seed(2)).actions
    return rewards_of(batch["observation"], actions).mean().item()


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("stochastic", ["one", "all"])
def test_the_reward_rises(algorithm, stochastic):
    before, after = learn(algorithm, stochastic=stochastic)
    assert after > 0.1 * before  # rewards are negative


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_it_rises_with_stale_samples_too(algorithm):
    before, after = learn(algorithm, lag=2)
    assert after > 0.1 * before  # rewards are negative


def test_it_falls_where_the_reward_is_turned_round():
    before, after = learn("grpo", mutation=-1.0, iterations=6)
    assert after < before
