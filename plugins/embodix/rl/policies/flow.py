# SPDX-License-Identifier: Apache-2.0
"""What a flow-matching policy of LeRobot has to offer to be sampled with log-probabilities.

The direction is π0.5's (``transitions.py``): steps count from 0 (pure noise) to K - 1, the velocity is noise minus
action.

Shape suffixes: B observations, F stochastic steps of each, T action steps, A padded action dimensions, W a width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


class ObservedFlow(Protocol):
    """The velocity field of one batch of observations, without gradients; what all steps share is computed once."""

    noise_dtype: torch.dtype

    def initial_noise(self) -> Tensor:
        """``[B, T, A]`` where the host starts, drawn from torch's stream as the host draws it."""
        ...

    def step(self, x_BTA: Tensor, step_B: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity ``[B, T, A]`` and features of the action tokens ``[B, W]`` at steps ``step_B``."""
        ...

    def prefix_features(self) -> Tensor:
        """``[B, W]`` features of the observations; known after the first step."""
        ...


@dataclass(frozen=True)
class RecomputedSteps:
    """Chosen steps with gradients: ``velocity_BFTA``, ``action_features_BFW`` and ``prefix_features_BW``."""

    velocity_BFTA: Tensor
    action_features_BFW: Tensor
    prefix_features_BW: Tensor


class FlowHost(Protocol):
    """One policy of LeRobot on the packed path."""

    sizes: FlowSizes

    @property
    def device(self) -> torch.device:
        """Where the policy is now."""
        ...

    def batch_size(self, batch: Batch) -> int:
        """Observations of a batch."""
        ...

    def observe(self, batch: Batch) -> ObservedFlow:
        """The flow for a preprocessed batch of observations.

        Raises:
            ValueError: a batch that the policy's fast path refuses.
        """
        ...

    def recompute(self, batch: Batch, x_BFTA: Tensor, step_BF: Tensor) -> RecomputedSteps:
        """Velocities of noisy actions, differentiable; the observation is computed once for its F steps."""
        ...

    def pack_observation(self, batch: Batch) -> dict[str, Tensor]:
        """What the policy reads of a batch, as tensors whose first dimension is the sample."""
        ...

    def unpack_observation(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The batch that ``pack_observation`` packed, its samples in any selection and order."""
        ...

    def concatenate(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Inputs of several rollouts as one, whatever the padding of their prompts."""
        ...

    def pad(self, inputs: Mapping[str, Tensor], prompt_length: int, num_images: int) -> dict[str, Tensor]:
        """Inputs that can be joined by ``torch.cat`` with all others that were padded so.

        Raises:
            ValueError: a prompt or a number of images beyond these sizes.
        """
        ...


def mean_over_tokens(rows_NW: Tensor, layout: PackedLayout) -> Tensor:
    """``[B, W]`` mean of the valid rows of each sample, in fp32."""
    rows_VW = rows_NW if layout.valid_rows_V is None else rows_NW.index_select(0, layout.valid_rows_V)
    lengths_B = torch.tensor(layout.lengths, device=rows_NW.device)
    samples_V = torch.arange(len(layout.lengths), device=rows_NW.device).repeat_interleave(lengths_B)
    sums_BW = rows_NW.new_zeros(len(layout.lengths), rows_NW.shape[1], dtype=torch.float32)
    return sums_BW.index_add(0, samples_V, rows_VW.float()) / lengths_B[:, None]
