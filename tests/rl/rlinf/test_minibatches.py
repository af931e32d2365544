# SPDX-License-Identifier: Apache-2.0
"""Several optimizer steps a version, without RLinf: order, proximal policy, and what one step must give alike."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from embodix_rl.objectives.objective import SampledChunks
from embodix_rl.rlinf.asynchronous.version_update import (
    MiniBatches,
    OneStep,
    ShardSamples,
    StreamedUpdate,
    joined,
    objective_of,
)
from embodix_rl.rlinf.hosts import missing
from embodix_rl.scheduling.streamer import Scale
from embodix_rl.testing.rl_updates import GRPO_ALGORITHM

STEPS, ENVS = 3, 2


class Gaussian(nn.Module):
    """Actions of 2 steps and 3 dimensions; no values, as in GRPO."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(5, 6)

    def forward(self, inputs: Any) -> dict[str, torch.Tensor]:
        normal = torch.distributions.Normal(self.mean(inputs["states"]).view(-1, 2, 3), 0.5)
        return {"logprobs": normal.log_prob(inputs["action"])}


def _samples(policy: Gaussian, shard: str, generator: torch.Generator, stale: float = 0.0) -> ShardSamples:
    num = STEPS * ENVS
    inputs = {
        "states": torch.randn(num, 5, generator=generator),
        "action": torch.randn(num, 2, 3, generator=generator),
    }
    with torch.no_grad():
        behaviour = policy(inputs)["logprobs"] + stale * torch.randn(num, 2, 3, generator=generator)
    sampled = SampledChunks(
        behaviour,
        torch.randn(num, generator=generator),
        torch.rand(num, generator=generator) > 0.2,
        weights_B=torch.rand(num, generator=generator) + 0.5,
    )
    return ShardSamples(inputs, sampled, torch.ones(num, dtype=torch.bool), shard, STEPS)


def _update(policy: Gaussian, size: int | None = None, epochs: int = 1) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    gradient = StreamedUpdate(policy, objective_of(GRPO_ALGORITHM, 5.0), micro_batch=3)

    def step() -> dict[str, float]:
        optimizer.step()
        optimizer.zero_grad()
        return {"steps": 1.0}

    if size is None:
        return OneStep(gradient, policy.parameters, step), optimizer
    batches = MiniBatches(gradient, policy.parameters, step, policy, micro_batch=3, size=size, epochs=epochs, seed=7)
    return batches, optimizer


def _trained(start: Gaussian, parts: list[ShardSamples], size: int | None, epochs: int = 1) -> Any:
    policy = copy.deepcopy(start)
    update, _ = _update(policy, size, epochs)
    for part in parts:
        update.prepare(part)
    for part in parts:
        update.train(part, Scale(0.1, 1.3))
    return policy, update.finish()


@pytest.fixture
def parts():
    torch.manual_seed(3)
    policy, generator = Gaussian(), torch.Generator().manual_seed(1)
    return policy, [_samples(policy, shard, generator, 0.05) for shard in ("env 0", "env 1", "env 0", "env 1")]


def test_one_mini_batch_is_the_streamed_step(parts):
    policy, several = parts
    whole = len(several) * STEPS * ENVS
    one, metrics = _trained(policy, several, None)
    other, same = _trained(policy, several, whole)
    for got, wanted in zip(other.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)
    assert not torch.equal(one.mean.weight, policy.mean.weight)
    assert same == pytest.approx(metrics, rel=1e-4, abs=1e-6) and "critic/value_loss" not in same


def test_the_order_does_not_depend_on_arrival(parts):
    policy, several = parts
    results = [_trained(policy, order, 8, 2)[0] for order in (several, [several[i] for i in (1, 0, 3, 2)])]
    assert torch.equal(results[0].mean.weight, results[1].mean.weight)
    twice = joined([several[i] for i in (2, 1, 0, 3)])  # another first trajectory of env 0 is another order
    assert not torch.equal(twice.inputs["states"], joined(several).inputs["states"])


def test_a_batch_is_ordered_by_step_then_trajectory(parts):
    _, several = parts
    whole = joined(several)
    per_step = whole.inputs["states"].view(STEPS, 4 * ENVS, 5)
    for place, part in enumerate(several):
        expected = part.inputs["states"].view(STEPS, ENVS, 5)
        assert torch.equal(per_step[:, place * ENVS : (place + 1) * ENVS], expected)


def test_the_clip_is_taken_to_the_policy_at_the_beginning_of_the_version(parts):
    """After enough epochs ratios leave the clip; were the proximal policy the current one they never could."""
    policy, several = parts
    _, metrics = _trained(policy, several, 8, epochs=40)
    assert metrics["actor/clip_fraction"] > 0.05 and metrics["steps"] == 1.0
    _, one = _trained(policy, several, 24)
    assert one["actor/clip_fraction"] == 0.0
    assert one["actor/behaviour_weight_mean"] != pytest.approx(1.0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason="; ".join(missing()) or "RLinf and Ray are installed")
def test_parameters_after_an_update_are_those_of_rlinfs_synchronous_update():
    """RLinf's own masks, advantages, losses and steps, on fresh trajectories: PPO and GRPO, one step and several."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("sync_update.py"))],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {one["scenario"]: one["steps"] for one in results} == {
        "ppo": [1, 1],
        "ppo_steps": [12, 12],
        "ppo_masked": [1, 1],
        "grpo": [1, 1],
        "grpo_steps": [4, 4],
        "grpo_filtered": [2, 2],
        "grpo_even": [1, 1],
    }
    (even,) = (one for one in results if one["scenario"] == "grpo_even")
    assert even["groups"] == [1, 2]
    assert even["counted"]["leave_out"] == even["counted"]["count"] / 2 > 0
    for one in results:
        assert one["moved"] > 5e-3 and one["apart"] < 2e-5, one
