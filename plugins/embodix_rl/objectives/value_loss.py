# SPDX-License-Identifier: Apache-2.0
"""The loss of the value head.

Shape suffix: B chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


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


@torch.no_grad()
def explained_variance(values_B: Tensor, returns_B: Tensor, valid_B: Tensor) -> float:
    """Share of the variance of returns that the values explain; NaN where returns do not vary."""
    returns, values = returns_B[valid_B].double(), values_B[valid_B].double()
    if returns.numel() < 2 or not bool(returns.var() > 0):
        return float("nan")
    return 1.0 - float((returns - values).var() / returns.var())
