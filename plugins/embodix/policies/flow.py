# SPDX-License-Identifier: Apache-2.0
"""What a flow-matching policy of LeRobot has to offer to be sampled with log-probabilities.

The direction is from noise to action: steps count from 0 (pure noise) to K - 1, the velocity is noise minus
action.

Shape suffixes: B observations, F stochastic steps of each, T action steps, A padded action dimensions, W a width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodix.packing.layout import PackedLayout

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class FlowSizes:
    """Sizes of one policy.

    Attributes:
        num_denoising: denoising steps.
        num_predicted: action steps of a chunk.
        num_executed: those that are executed before the next chunk is asked for.
        padded_dims: action dimensions that the model computes.
        action_dims: those that exist, the first ones.
        prefix_width, action_width: of the features that a value head can read.
    """

    num_denoising: int
    num_predicted: int
    num_executed: int
    padded_dims: int
    action_dims: int
    prefix_width: int
    action_width: int


@dataclass(frozen=True)
class RecomputedSteps:
    """Chosen steps with gradients: ``velocity_BFTA``, ``action_features_BFW`` and ``prefix_features_BW``."""

    velocity_BFTA: Tensor
    action_features_BFW: Tensor
    prefix_features_BW: Tensor


def mean_over_tokens(rows_NW: Tensor, layout: PackedLayout) -> Tensor:
    """``[B, W]`` mean of the valid rows of each sample, in fp32."""
    rows_VW = rows_NW if layout.valid_rows_V is None else rows_NW.index_select(0, layout.valid_rows_V)
    lengths_B = torch.tensor(layout.lengths, device=rows_NW.device)
    samples_V = torch.arange(len(layout.lengths), device=rows_NW.device).repeat_interleave(lengths_B)
    sums_BW = rows_NW.new_zeros(len(layout.lengths), rows_NW.shape[1], dtype=torch.float32)
    return sums_BW.index_add(0, samples_V, rows_VW.float()) / lengths_B[:, None]
