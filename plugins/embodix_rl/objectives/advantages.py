# SPDX-License-Identifier: Apache-2.0
"""Advantages: generalised advantage estimation for PPO, group-relative ones for GRPO.

Steps that are not valid (of an environment that crashed, or after the end of an episode) get advantage and return 0,
and nothing that they hold, not even NaN, reaches the others.

Shape suffixes: S steps, B environments or episodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Transitions:
    """Steps of environments, in order; an environment that ends an episode goes on with the next.

    Attributes:
        rewards_SB: collected in each step (of a chunk: their sum).
        values_SB: of the observation that each step acted on.
        next_values_SB: of the observation that each step led to, of the same episode: at a truncation that of its last
            observation, not of the next episode's first. See `next_values`.
        terminated_SB: bool, the episode ended in this step and nothing follows.
        truncated_SB: bool, the episode was cut off after this step, by a time limit say: what would have followed is
            worth ``next_values``.
        valid_SB: bool, the step counts.
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


def next_values(values_SB: Tensor, last_values_B: Tensor, final_values_SB: Tensor, ended_SB: Tensor) -> Tensor:
    """``[S, B]`` values of what each step led to.

    Args:
        values_SB: of the observations that were acted on.
        last_values_B: of the observations after the last step.
        final_values_SB: of the last observation of an episode, where one ended; read there only.
        ended_SB: bool, an episode ended in this step, terminated or truncated.
    """
    following_SB = torch.cat([values_SB[1:], last_values_B[None]])
    return torch.where(ended_SB, final_values_SB, following_SB)


def group_advantages(
    scores_B: Tensor, groups_B: Tensor, valid_B: Tensor, *, scaled: bool = True, eps: float = 1e-6
) -> Tensor:
    """``[B]`` advantage of each episode over those of its group (GRPO, arXiv 2402.03300).

    Mean and standard deviation are those of the valid members. A group with fewer than two of them, or whose members
    all score alike, has nothing to compare: its advantages are 0.

    Args:
        scores_B: the sum of rewards of each episode.
        groups_B: int64, which group each episode is of: the same start, as many times as the group is large.
        valid_B: bool, episodes that count; one with a crash in it does not.
        scaled: divide by the standard deviation; without, the mean alone is subtracted (Dr. GRPO, arXiv 2503.20783).
    """
    _, index_B = groups_B.unique(return_inverse=True)
    num_groups = int(index_B.max()) + 1 if index_B.numel() else 0
    scores_B = torch.where(valid_B, scores_B, 0.0)

    def sum_by_group(values_B: Tensor) -> Tensor:
        return values_B.new_zeros(num_groups).index_add(0, index_B, values_B)

    counts_G = sum_by_group(valid_B.to(scores_B.dtype))
    means_G = sum_by_group(scores_B) / counts_G.clamp(min=1)
    deviations_B = torch.where(valid_B, scores_B - means_G[index_B], 0.0)
    if scaled:
        variances_G = sum_by_group(deviations_B.square()) / (counts_G - 1).clamp(min=1)
        deviations_B = deviations_B / (variances_G.sqrt()[index_B] + eps)
    return torch.where(counts_G[index_B] >= 2, deviations_B, 0.0)
