# SPDX-License-Identifier: Apache-2.0
"""The learner of rl_in_process.py: advantages of whole episodes, and the update of one batch of chunks.

Runners of `lerobot rl` learn by RLinf's advantages and their own loops.

Shape suffixes: S steps, B environments, episodes or chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from embodix_rl.flow.flow_policy import FlowPolicy
from embodix_rl.objectives.objective import Losses, ObjectiveSettings, SampledChunks, chunk_losses
from embodix_rl.objectives.policy_loss import RatioStatistics

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Transitions:
    """Steps of environments, in order.

    Attributes:
        rewards_SB: collected in each step (of a chunk: their sum).
        values_SB: of the observation that each step acted on.
        next_values_SB: of the observation that each step led to, of the same episode: at a truncation that of its last
            observation, not of the next episode's first.
        terminated_SB: bool, the episode ended in this step and nothing follows.
        truncated_SB: bool, the episode was cut off after this step, by a time limit say: what would have followed is
            worth ``next_values``.
        valid_SB: bool, the step counts. The others get advantage and return 0, and nothing that they hold, not even
            NaN, reaches the rest.
    """

    rewards_SB: Tensor
    values_SB: Tensor
    next_values_SB: Tensor
    terminated_SB: Tensor
    truncated_SB: Tensor
    valid_SB: Tensor

    def __post_init__(self) -> None:
        shapes = {name: tuple(value.shape) for name, value in vars(self).items()}
        if len(set(shapes.values())) > 1 or self.rewards_SB.ndim != 2:
            raise ValueError(f"Transitions are [steps, environments] tensors of one shape; got {shapes}.")


def generalized_advantages(steps: Transitions, discount: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns ``[S, B]`` (Schulman et al. 2016).

    ``delta = reward + discount * next_value * (1 - terminated) - value``, and an advantage is the sum of the deltas up
    to the end of its episode, weighted by ``(discount * gae_lambda)^n``. A step before one that is not valid is treated
    as a truncated one.
    """
    valid_SB = steps.valid_SB
    bootstrap_SB = torch.where(valid_SB & ~steps.terminated_SB, steps.next_values_SB, 0.0)
    deltas_SB = torch.where(valid_SB, steps.rewards_SB + discount * bootstrap_SB - steps.values_SB, 0.0)
    goes_on_SB = valid_SB & ~steps.terminated_SB & ~steps.truncated_SB
    advantages_SB = torch.empty_like(deltas_SB)
    running_B = torch.zeros_like(deltas_SB[0])
    for step in reversed(range(deltas_SB.shape[0])):
        running_B = deltas_SB[step] + discount * gae_lambda * goes_on_SB[step] * running_B
        advantages_SB[step] = running_B
    return advantages_SB, torch.where(valid_SB, advantages_SB + steps.values_SB, 0.0)


def group_advantages(scores_B: Tensor, groups_B: Tensor, valid_B: Tensor, *, eps: float = 1e-6) -> Tensor:
    """``[B]`` advantage of each episode over those of its group (GRPO, arXiv 2402.03300).

    Mean and standard deviation are those of the valid members. A group with fewer than two of them, or whose members
    all score alike, has nothing to compare: its advantages are 0.

    Args:
        scores_B: the sum of rewards of each episode.
        groups_B: int64, which group each episode is of: the same start, as many times as the group is large.
        valid_B: bool, episodes that count; one with a crash in it does not.
    """
    _, index_B = groups_B.unique(return_inverse=True)
    num_groups = int(index_B.max()) + 1 if index_B.numel() else 0
    scores_B = torch.where(valid_B, scores_B, 0.0)

    def sum_by_group(values_B: Tensor) -> Tensor:
        return values_B.new_zeros(num_groups).index_add(0, index_B, values_B)

    counts_G = sum_by_group(valid_B.to(scores_B.dtype))
    means_G = sum_by_group(scores_B) / counts_G.clamp(min=1)
    deviations_B = torch.where(valid_B, scores_B - means_G[index_B], 0.0)
    variances_G = sum_by_group(deviations_B.square()) / (counts_G - 1).clamp(min=1)
    deviations_B = deviations_B / (variances_G.sqrt()[index_B] + eps)
    return torch.where(counts_G[index_B] >= 2, deviations_B, 0.0)


def normalised(values: Tensor, valid: Tensor, eps: float = 1e-5) -> Tensor:
    """``(values - mean) / (std + eps)`` of the valid ones, computed in fp64; 0 elsewhere."""
    chosen = values[valid].double()
    std = float(chosen.std()) if chosen.numel() > 1 else 0.0
    mean = float(chosen.mean()) if chosen.numel() else 0.0
    return torch.where(valid, (values.double() - mean) / (std + eps), 0.0).to(values.dtype)


@torch.no_grad()
def explained_variance(values_B: Tensor, returns_B: Tensor) -> float:
    """Share of the variance of returns that the values explain; NaN where returns do not vary."""
    returns, values = returns_B.double(), values_B.double()
    if returns.numel() < 2 or not bool(returns.var() > 0):
        return float("nan")
    return 1.0 - float((returns - values).var() / returns.var())


@dataclass(frozen=True)
class UpdateSettings:
    """How a batch is used: `num_epochs` times, `global_batch` chunks an optimizer step, `micro_batch` at a time."""

    num_epochs: int
    global_batch: int
    micro_batch: int
    max_grad_norm: float = 1.0


def update(
    policy: FlowPolicy,
    optimizer: torch.optim.Optimizer,
    inputs: Inputs,
    sampled: SampledChunks,
    objective: ObjectiveSettings,
    settings: UpdateSettings,
    generator: torch.Generator,
) -> dict[str, float]:
    """Train on a batch.

    Args:
        inputs: the rollout's ``forward_inputs``.
        sampled: log-probabilities, advantages and returns.
        generator: decides the order of the chunks.

    Returns:
        The mean value loss of a step, and the ratios of the last epoch.
    """
    steps: list[list[Losses]] = []
    ratios = RatioStatistics()
    for _ in range(settings.num_epochs):
        ratios = RatioStatistics()
        for rows_B in torch.randperm(sampled.valid_B.numel(), generator=generator).split(settings.global_batch):
            losses = _accumulate(policy, inputs, sampled, objective, settings.micro_batch, rows_B)
            _step(optimizer, settings.max_grad_norm)
            steps.append(losses)
            ratios = sum((part.ratios for part in losses), ratios)
    value_loss = sum(part.value for losses in steps for part in losses) / len(steps)
    return {"value_loss": value_loss, **ratios.metrics()}


def _accumulate(
    policy: FlowPolicy,
    inputs: Inputs,
    sampled: SampledChunks,
    objective: ObjectiveSettings,
    micro_batch: int,
    rows_B: Tensor,
) -> list[Losses]:
    """Gradients of one global batch, whose micro-batches add up to its mean."""
    num_valid = float(sampled.valid_B[rows_B].sum())
    parts = []
    for rows_R in rows_B.split(micro_batch):
        again = policy.evaluate({key: value[rows_R] for key, value in inputs.items()})
        losses = chunk_losses(
            sampled[rows_R], again.log_probs, again.entropy, again.values, objective, num_valid=num_valid
        )
        losses.total.backward()
        parts.append(losses)
    return parts


def _step(optimizer: torch.optim.Optimizer, max_grad_norm: float) -> None:
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    torch.nn.utils.clip_grad_norm_(trained, max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
