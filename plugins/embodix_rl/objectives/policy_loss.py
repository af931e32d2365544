# SPDX-License-Identifier: Apache-2.0
"""PPO's clipped objective, decoupled for stale samples, and statistics of its importance ratios.

The ratio that is clipped is taken to a proximal policy, a recent one; the weight of the proximal policy over the one
that sampled corrects for staleness and has no gradient (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298).
Where both are the same policy the weight is exactly 1 and this is PPO. GRPO is the same loss with its own advantages.

Tensors are ``[B]``, ``[B, T]`` or ``[B, T, A]``, as ``objective.at_level`` leaves them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class RatioStatistics:
    """Sums over the valid elements of a part; ``+`` gives those of both parts.

    Attributes:
        count: valid elements.
        ratio, ratio_squared: of the policy that is trained to the one that sampled.
        ratio_max: the largest.
        log_ratio: for the approximate KL divergence.
        behaviour_weight: of the proximal policy to the one that sampled, before its cap.
        clipped, dual_clipped, capped: elements that lost their gradient to the clip, to the dual clip, and whose
            behaviour weight was beyond its cap.
    """

    count: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    ratio_max: float = 0.0
    log_ratio: float = 0.0
    behaviour_weight: float = 0.0
    clipped: float = 0.0
    dual_clipped: float = 0.0
    capped: float = 0.0

    def __add__(self, other: RatioStatistics) -> RatioStatistics:
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return RatioStatistics(**{**sums, "ratio_max": max(self.ratio_max, other.ratio_max)})

    def metrics(self) -> dict[str, float]:
        """Means, the largest ratio, the effective sample size as a share, and the approximate KL divergence.

        ``approx_kl`` is the mean of ``ratio - 1 - log(ratio)``, which is never negative (Schulman, 2020).
        """
        if not self.count:
            return {}
        return {
            "ratio_mean": self.ratio / self.count,
            "ratio_max": self.ratio_max,
            "effective_sample_share": self.ratio**2 / (self.count * self.ratio_squared) if self.ratio_squared else 0.0,
            "approx_kl": (self.ratio - self.log_ratio) / self.count - 1.0,
            "behaviour_weight_mean": self.behaviour_weight / self.count,
            "clip_fraction": self.clipped / self.count,
            "dual_clip_fraction": self.dual_clipped / self.count,
            "cap_fraction": self.capped / self.count,
        }


# exp(20) is 5e8: no clip lets such a ratio count, and products and sums with it stay finite in fp32.
MAX_LOG_RATIO = 20.0


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """``exp(log_ratio)``, finite whatever the log-ratio."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@torch.no_grad()
def ratio_statistics(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    valid: Tensor,
    *,
    behaviour_weight: Tensor | None = None,
    clipped: Tensor | None = None,
    dual_clipped: Tensor | None = None,
    capped: Tensor | None = None,
) -> RatioStatistics:
    """Statistics of ``exp(log_probs - behaviour_log_probs)`` where ``valid``.

    With the log-probabilities of training and those that a quantized or otherwise different sampler reported, this is
    the mismatch between the two.
    """
    log_ratio = (log_probs - behaviour_log_probs)[valid].double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()

    def total(values: Tensor | None) -> float:
        return 0.0 if values is None else float(values[valid].double().sum())

    return RatioStatistics(
        count=float(ratio.numel()),
        ratio=float(ratio.sum()),
        ratio_squared=float(ratio.square().sum()),
        ratio_max=float(ratio.max()) if ratio.numel() else 0.0,
        log_ratio=float(log_ratio.sum()),
        behaviour_weight=float(ratio.numel()) if behaviour_weight is None else total(behaviour_weight),
        clipped=total(clipped),
        dual_clipped=total(dual_clipped),
        capped=total(capped),
    )


@dataclass(frozen=True)
class PolicyLossSettings:
    """Clips of the policy loss.

    Attributes:
        clip_low, clip_high: the ratio's distance from 1 beyond which it earns nothing more.
        dual_clip: where the advantage is negative the loss is no larger than this times its size (Ye et al., arXiv
            1912.09729); None for no such bound.
        behaviour_cap: largest weight of the proximal policy over the one that sampled, which an element beyond it gets
            too (AReaL and RLinf give it none); None for no cap.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    behaviour_cap: float | None = 5.0

    def __post_init__(self) -> None:
        if not (0.0 < self.clip_low < 1.0 and self.clip_high > 0.0):
            raise ValueError(
                f"clip_low is between 0 and 1 and clip_high above 0; got {self.clip_low} and {self.clip_high}."
            )
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ValueError(f"dual_clip is above 1, or null for none; got {self.dual_clip}.")
        if self.behaviour_cap is not None and self.behaviour_cap < 1.0:
            raise ValueError(f"behaviour_cap is 1 at least, or null for none; got {self.behaviour_cap}.")


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
    return weight.clamp(max=settings.behaviour_cap), weight > settings.behaviour_cap


def _spread(values_B: Tensor, like: Tensor) -> Tensor:
    return values_B.reshape(-1, *[1] * (like.ndim - 1))


def _count(valid_B: Tensor, num_valid: float | None) -> float:
    """What a sum is divided by; 1 where nothing counts, so that the loss is 0."""
    return max(1.0, float(valid_B.sum()) if num_valid is None else num_valid)
