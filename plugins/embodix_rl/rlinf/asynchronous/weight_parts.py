# SPDX-License-Identifier: Apache-2.0
"""A model's weights as the parts of a version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from embodix_rl.scheduling.weights import Part

Weights = dict[str, Tensor]


def split_weights(weights: Mapping[str, Tensor], part_bytes: int) -> list[Weights]:
    """Copies of the weights in CPU memory, in parts of about `part_bytes`, in their order; none is divided."""
    parts: list[Weights] = [{}]
    size = 0
    for name, weight in weights.items():
        copied = weight.detach().to("cpu", copy=True)
        if parts[-1] and size + copied.nbytes > part_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = copied
        size += copied.nbytes
    return parts


class ModelBuffer:
    """One of a rollout worker's two models (`embodix_rl.scheduling.weights.Buffer`)."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._weights: dict[str, Any] = model.state_dict()
        self._tell_changed = getattr(model, "weights_changed", None)  # of a model that computes with a copy of them

    @property
    def names(self) -> list[str]:
        """Of the weights, in their order."""
        return list(self._weights)

    @torch.no_grad()
    def write(self, part: Part) -> None:
        """Copy a part into the model.

        Raises:
            KeyError: a weight that the model has not.
        """
        for name, weight in part.payload.items():
            self._weights[name].copy_(weight)
        if self._tell_changed is not None:
            self._tell_changed()
