# SPDX-License-Identifier: Apache-2.0
"""PPO and GRPO as one objective of a micro-batch of chunks.

Shape suffixes: B chunks, T action steps, A action dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from embodix_rl.objectives.log_probs import LogProbLevel, at_level, interpolated_proximal
from embodix_rl.objectives.policy_loss import PolicyLossSettings, policy_loss
from embodix_rl.objectives.ratios import RatioStatistics
from embodix_rl.objectives.value_loss import ValueLossSettings, value_loss

ProximalSource = Literal["behaviour", "recompute", "interpolate"]


@dataclass(frozen=True)
class ObjectiveSettings:
    """What is optimised.

    Attributes:
        level: what a ratio is taken of: a whole chunk, an action step, or an element.
        proximal: ``behaviour`` is plain PPO or GRPO; the other two decouple the clip from the policy that sampled, with
            the policy at the beginning of the update ``recompute``d by a forward pass, or ``interpolate``d.
        policy: clips of the policy loss.
        value: of the value loss; None where there is no value head.
        value_weight, entropy_weight: of the value loss, and of the entropy as a bonus. The entropy of a flow with a
            fixed noise level has no gradient.
    """

    level: LogProbLevel = "chunk"
    proximal: ProximalSource = "recompute"
    policy: PolicyLossSettings = field(default_factory=PolicyLossSettings)
    value: ValueLossSettings | None = field(default_factory=ValueLossSettings)
    value_weight: float = 1.0
    entropy_weight: float = 0.0

    def __post_init__(self) -> None:
        if self.proximal not in ("behaviour", "recompute", "interpolate"):
            raise ValueError(f"proximal is one of behaviour, recompute, interpolate; got {self.proximal!r}.")


@dataclass(frozen=True)
class Sampled:
    """Chunks as they were sampled, and what became of them.

    Attributes:
        log_probs_BTA: of the policy that sampled.
        advantages_B: normalised where they are to be.
        valid_B: bool, chunks that count.
        versions_B: int64, the policy version that each was sampled with.
        returns_B, values_B: for the value loss; None without one.
        proximal_log_probs_BTA: of the policy at the beginning of the update, where it is recomputed.
        executed_BT: bool, action steps that were executed; None for all.
        weights_B: of each chunk's losses; None for 1.
    """

    log_probs_BTA: Tensor
    advantages_B: Tensor
    valid_B: Tensor
    versions_B: Tensor
    returns_B: Tensor | None = None
    values_B: Tensor | None = None
    proximal_log_probs_BTA: Tensor | None = None
    executed_BT: Tensor | None = None
    weights_B: Tensor | None = None

    def __getitem__(self, rows: Tensor) -> Sampled:
        """Some of the chunks."""
        parts = {item.name: getattr(self, item.name) for item in fields(self)}
        chosen: dict[str, Any] = {name: None if part is None else part[rows] for name, part in parts.items()}
        return Sampled(**chosen)


@dataclass(frozen=True)
class Losses:
    """Loss of a micro-batch, with gradients, and its parts; parts of one batch add up to its means."""

    total: Tensor
    policy: float
    value: float
    entropy: float
    ratios: RatioStatistics


def chunk_losses(
    sampled: Sampled,
    log_probs_BTA: Tensor,
    entropy_B: Tensor,
    values_B: Tensor | None,
    settings: ObjectiveSettings,
    *,
    version: int,
    num_valid: float | None = None,
) -> Losses:
    """The objective of a micro-batch.

    Args:
        sampled: the chunks.
        log_probs_BTA, entropy_B, values_B: recomputed by the policy that is trained, with gradients.
        version: of that policy: updates that were finished before this one.
        num_valid: valid chunks of the whole batch; None for those of this micro-batch.

    Raises:
        ValueError: what the settings need is not there.
    """
    _require_parts(sampled, values_B, settings)
    current, behaviour = (
        at_level(part, settings.level, sampled.executed_BT) for part in (log_probs_BTA, sampled.log_probs_BTA)
    )
    proximal = None
    if settings.proximal == "recompute":
        assert sampled.proximal_log_probs_BTA is not None
        proximal = at_level(sampled.proximal_log_probs_BTA, settings.level, sampled.executed_BT)
    elif settings.proximal == "interpolate":
        proximal = interpolated_proximal(behaviour, current, sampled.versions_B, version)
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
        total, of_values = total + settings.value_weight * error, float(error.detach())
    return Losses(total, float(loss.detach()), of_values, float(entropy.detach()), ratios)


def _require_parts(sampled: Sampled, values_B: Tensor | None, settings: ObjectiveSettings) -> None:
    if settings.proximal == "recompute" and sampled.proximal_log_probs_BTA is None:
        raise ValueError(
            "proximal=recompute needs the log-probabilities of the policy at the beginning of the update "
            "(proximal_log_probs_BTA): evaluate the batch before the first step, or choose proximal=interpolate."
        )
    if settings.value is not None and (values_B is None or sampled.returns_B is None or sampled.values_B is None):
        raise ValueError(
            "The value loss needs values, returns and the rollout's values; set value=null where the policy has no "
            "value head, as for GRPO."
        )
