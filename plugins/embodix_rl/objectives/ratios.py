# SPDX-License-Identifier: Apache-2.0
"""Statistics of importance ratios, added up over micro-batches and ranks."""

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
