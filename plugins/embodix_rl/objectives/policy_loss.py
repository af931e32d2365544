# SPDX-License-Identifier: Apache-2.0
"""PPO's clipped objective, decoupled for stale samples.

The ratio that is clipped is taken to a proximal policy, a recent one; the weight of the proximal policy over the one
that sampled corrects for staleness and has no gradient (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298).
Where both are the same policy the weight is exactly 1 and this is PPO. GRPO is the same loss with its own advantages.

Tensors are ``[B]``, ``[B, T]`` or ``[B, T, A]``, as ``log_probs.at_level`` leaves them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodix_rl.objectives.ratios import RatioStatistics, bounded_ratio, ratio_statistics


@dataclass(frozen=True)
class PolicyLossSettings:
    """Clips of the policy loss.

    Attributes:
        clip_low, clip_high: the ratio's distance from 1 beyond which it earns nothing more.
        dual_clip: where the advantage is negative the loss is no larger than this times its size (Ye et al., arXiv
            1912.09729); None for no such bound.
        behaviour_cap: largest weight of the proximal policy over the one that sampled; None for no cap.
        beyond_cap: ``clip`` gives an element beyond the cap the cap itself; ``drop`` gives it no weight, as AReaL and
            RLinf do.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    behaviour_cap: float | None = 5.0
    beyond_cap: Literal["clip", "drop"] = "clip"

    def __post_init__(self) -> None:
        if not (0.0 < self.clip_low < 1.0 and self.clip_high > 0.0):
            raise ValueError(
                f"clip_low is between 0 and 1 and clip_high above 0; got {self.clip_low} and {self.clip_high}."
            )
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ValueError(f"dual_clip is above 1, or null for none; got {self.dual_clip}.")
        if self.behaviour_cap is not None and self.behaviour_cap < 1.0:
            raise ValueError(f"behaviour_cap is 1 at least, or null for none; got {self.behaviour_cap}.")
        if self.beyond_cap not in ("clip", "drop"):
            raise ValueError(f"beyond_cap is clip or drop; got {self.beyond_cap!r}.")


def policy_loss(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    advantages_B: Tensor,
    valid_B: Tensor,
    settings: PolicyLossSettings,
    *,
    proximal_log_probs: Tensor | None = None,
    weights_B: Tensor | None = None,
    num_valid: float | None = None,
) -> tuple[Tensor, RatioStatistics]:
    """The loss to minimise, and statistics of its ratios.

    Args:
        log_probs: of the policy that is trained, with gradients.
        behaviour_log_probs: of the policy that sampled.
        advantages_B: of each chunk.
        valid_B: bool, chunks that count. The others have no weight, whatever they hold.
        proximal_log_probs: of the proximal policy; None where that is the one that sampled.
        weights_B: of each chunk's loss; None for 1.
        num_valid: valid chunks of the whole batch, so that the losses of its micro-batches add up to its mean; None for
            those of this one.
    """
    valid = _spread(valid_B, log_probs).expand_as(log_probs)
    behaviour = behaviour_log_probs.detach()
    proximal = behaviour if proximal_log_probs is None else proximal_log_probs.detach()
    # Of elements without weight nothing is computed: NaN * 0 would be NaN, in the gradient too.
    log_probs, behaviour, proximal = (torch.where(valid, part, 0.0) for part in (log_probs, behaviour, proximal))
    advantages = torch.where(valid, _spread(advantages_B.detach(), log_probs), 0.0)

    ratio = bounded_ratio(log_probs - proximal)
    unclipped = -advantages * ratio
    losses = torch.maximum(unclipped, -advantages * ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high))
    clipped, dual_clipped = losses > unclipped, torch.zeros_like(valid)
    if settings.dual_clip is not None:
        bound = settings.dual_clip * advantages.abs()
        dual_clipped = losses > bound
        losses = torch.minimum(losses, bound)

    weight = bounded_ratio(proximal - behaviour)
    capped_weight, capped = _cap(weight, settings)
    statistics = ratio_statistics(
        log_probs,
        behaviour,
        valid,
        behaviour_weight=weight,
        clipped=clipped,
        dual_clipped=dual_clipped,
        capped=capped,
    )
    if weights_B is not None:
        capped_weight = capped_weight * torch.where(valid, _spread(weights_B, log_probs), 0.0)
    elements_a_chunk = log_probs[0].numel() if log_probs.shape[0] else 1
    return (losses * capped_weight).sum() / (_count(valid_B, num_valid) * elements_a_chunk), statistics


def _cap(weight: Tensor, settings: PolicyLossSettings) -> tuple[Tensor, Tensor]:
    """The weight with its cap, and which elements were beyond it."""
    if settings.behaviour_cap is None:
        return weight, torch.zeros_like(weight, dtype=torch.bool)
    capped = weight > settings.behaviour_cap
    if settings.beyond_cap == "clip":
        return weight.clamp(max=settings.behaviour_cap), capped
    return torch.where(capped, 0.0, weight), capped


def _spread(values_B: Tensor, like: Tensor) -> Tensor:
    return values_B.reshape(-1, *[1] * (like.ndim - 1))


def _count(valid_B: Tensor, num_valid: float | None) -> float:
    """What a sum is divided by; 1 where nothing counts, so that the loss is 0."""
    return max(1.0, float(valid_B.sum()) if num_valid is None else num_valid)
