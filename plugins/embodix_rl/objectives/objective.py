# SPDX-License-Identifier: Apache-2.0
"""PPO and GRPO as one objective of a micro-batch of chunks, decoupled: the clip is taken to a proximal policy.

Shape suffixes: B chunks, T action steps, A action dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from embodix_rl.objectives.policy_loss import PolicyLossSettings, RatioStatistics, policy_loss

LogProbLevel = Literal["chunk", "action", "element"]


@dataclass(frozen=True)
class ValueLossSettings:
    """How far a value may move, and how errors are punished.

    Attributes:
        clip: an update that moves a value further than this from what the rollout predicted earns nothing more; None
            for no such bound. It is in the units of returns.
        huber_delta: errors beyond it are punished linearly; None for half of the squared error everywhere.
    """

    clip: float | None = None
    huber_delta: float | None = 10.0

    def __post_init__(self) -> None:
        for name in ("clip", "huber_delta"):
            value = getattr(self, name)
            if value is not None and value <= 0.0:
                raise ValueError(f"{name} of the value loss is positive, or null for none; got {value}.")


@dataclass(frozen=True)
class ObjectiveSettings:
    """What is optimised.

    Attributes:
        level: what a ratio is taken of: a whole chunk, an action step, or an element.
        policy: clips of the policy loss.
        value: of the value loss; None where there is no value head.
        entropy_weight: of the entropy as a bonus. That of a flow with a fixed noise level has no gradient.
    """

    level: LogProbLevel = "chunk"
    policy: PolicyLossSettings = field(default_factory=PolicyLossSettings)
    value: ValueLossSettings | None = field(default_factory=ValueLossSettings)
    entropy_weight: float = 0.0


@dataclass(frozen=True)
class SampledChunks:
    """Chunks as they were sampled, and what became of them.

    Attributes:
        log_probs_BTA: of the policy that sampled.
        advantages_B: normalised where they are to be.
        valid_B: bool, chunks that count.
        returns_B, values_B: for the value loss; None without one.
        proximal_log_probs_BTA: of the proximal policy; None until they are known.
        weights_B: of each chunk's losses; None for 1.
    """

    log_probs_BTA: Tensor
    advantages_B: Tensor
    valid_B: Tensor
    returns_B: Tensor | None = None
    values_B: Tensor | None = None
    proximal_log_probs_BTA: Tensor | None = None
    weights_B: Tensor | None = None

    def __getitem__(self, rows: Tensor) -> SampledChunks:
        """Some of the chunks."""
        parts = {item.name: getattr(self, item.name) for item in fields(self)}
        chosen: dict[str, Any] = {name: None if part is None else part[rows] for name, part in parts.items()}
        return SampledChunks(**chosen)


@dataclass(frozen=True)
class Losses:
    """Loss of a micro-batch, with gradients, and its parts; parts of one batch add up to its means."""

    total: Tensor
    policy: float
    value: float
    entropy: float
    ratios: RatioStatistics


def chunk_losses(
    sampled: SampledChunks,
    log_probs_BTA: Tensor,
    entropy_B: Tensor,
    values_B: Tensor | None,
    settings: ObjectiveSettings,
    *,
    num_valid: float | None = None,
) -> Losses:
    """The objective of a micro-batch.

    Args:
        sampled: the chunks.
        log_probs_BTA, entropy_B, values_B: recomputed by the policy that is trained, with gradients.
        num_valid: valid chunks of the whole batch; None for those of this micro-batch.

    Raises:
        ValueError: what the settings need is not there.
    """
    _require_parts(sampled, values_B, settings)
    assert sampled.proximal_log_probs_BTA is not None
    parts = (log_probs_BTA, sampled.log_probs_BTA, sampled.proximal_log_probs_BTA)
    current, behaviour, proximal = (at_level(part, settings.level) for part in parts)
    loss, ratios = policy_loss(
        current,
        behaviour,
        sampled.advantages_B,
        sampled.valid_B,
        settings.policy,
        proximal_log_probs=proximal,
        weights_B=sampled.weights_B,
        num_valid=num_valid,
    )
    count = max(1.0, float(sampled.valid_B.sum()) if num_valid is None else num_valid)
    weighted_B = entropy_B if sampled.weights_B is None else entropy_B * sampled.weights_B
    entropy = torch.where(sampled.valid_B, weighted_B, 0.0).sum() / count
    total, of_values = loss - settings.entropy_weight * entropy, 0.0
    if settings.value is not None:
        assert values_B is not None and sampled.returns_B is not None and sampled.values_B is not None
        error = value_loss(
            values_B,
            sampled.returns_B,
            sampled.values_B,
            sampled.valid_B,
            settings.value,
            weights_B=sampled.weights_B,
            num_valid=num_valid,
        )
        total, of_values = total + error, float(error.detach())
    return Losses(total, float(loss.detach()), of_values, float(entropy.detach()), ratios)


def at_level(log_probs_BTA: Tensor, level: LogProbLevel) -> Tensor:
    """Log-probabilities with one ratio a chunk ``[B]``, an action step ``[B, T]`` or an element ``[B, T, A]``.

    A chunk is what was decided at once, so its level is the exact one; finer levels clip each part by itself.

    Raises:
        ValueError: an unknown level.
    """
    if level not in get_args(LogProbLevel):
        raise ValueError(
            f"The level of log-probabilities is one of {', '.join(get_args(LogProbLevel))}; got {level!r}."
        )
    if level == "chunk":
        return log_probs_BTA.sum(dim=(1, 2))
    return log_probs_BTA.sum(dim=2) if level == "action" else log_probs_BTA


def value_loss(
    values_B: Tensor,
    returns_B: Tensor,
    rollout_values_B: Tensor,
    valid_B: Tensor,
    settings: ValueLossSettings,
    *,
    weights_B: Tensor | None = None,
    num_valid: float | None = None,
) -> Tensor:
    """Mean error of the values over the valid chunks; ``weights_B`` and ``num_valid`` as in `policy_loss`.

    Args:
        values_B: with gradients.
        returns_B: what they should be.
        rollout_values_B: what was predicted when the chunks were sampled; read with ``clip`` only.
    """
    values_B = torch.where(valid_B, values_B, 0.0)
    returns_B, before_B = (torch.where(valid_B, part.detach(), 0.0) for part in (returns_B, rollout_values_B))
    losses_B = _error(values_B, returns_B, settings.huber_delta)
    if settings.clip is not None:
        near_B = before_B + (values_B - before_B).clamp(-settings.clip, settings.clip)
        losses_B = torch.maximum(losses_B, _error(near_B, returns_B, settings.huber_delta))
    if weights_B is not None:
        losses_B = losses_B * weights_B
    count = max(1.0, float(valid_B.sum()) if num_valid is None else num_valid)
    return torch.where(valid_B, losses_B, 0.0).sum() / count


def _error(values_B: Tensor, returns_B: Tensor, huber_delta: float | None) -> Tensor:
    if huber_delta is None:
        return 0.5 * (values_B - returns_B).square()
    return F.huber_loss(values_B, returns_B, reduction="none", delta=huber_delta)


def _require_parts(sampled: SampledChunks, values_B: Tensor | None, settings: ObjectiveSettings) -> None:
    if sampled.proximal_log_probs_BTA is None:
        raise ValueError(
            "The objective needs the log-probabilities of the proximal policy (proximal_log_probs_BTA): those of the "
            "policy at the beginning of the update, evaluated before its first step."
        )
    if settings.value is not None and (values_B is None or sampled.returns_B is None or sampled.values_B is None):
        raise ValueError(
            "The value loss needs values, returns and the rollout's values; a policy without a value head is trained "
            "by algorithm=grpo."
        )
