# SPDX-License-Identifier: Apache-2.0
"""The value head: what the policy expects to collect from here on.

Shape suffixes: B observations, W width of the features.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn


@dataclass(frozen=True)
class ValueSettings:
    """What the value head reads and how it is built.

    Attributes:
        features: ``prefix`` reads the observation alone, the mean over its tokens (π-RL's choice for π0.5); ``action``
            reads the action tokens in the stochastic step, so that the value depends on the noise there too (π-RL's
            choice for π0).
        detached: the value loss does not train the policy.
        hidden_sizes: widths of the hidden layers.
    """

    features: Literal["prefix", "action"] = "prefix"
    detached: bool = True
    hidden_sizes: tuple[int, ...] = (256, 128)

    def __post_init__(self) -> None:
        if self.features not in ("prefix", "action"):
            raise ValueError(f"features of the value head are prefix or action; got {self.features!r}.")
        if any(size < 1 for size in self.hidden_sizes):
            raise ValueError(f"hidden_sizes are widths, 1 at least; got {self.hidden_sizes}.")


class ValueHead(nn.Module):
    """Normed features through a small network in fp32; 0 for every observation before it is trained."""

    def __init__(self, width: int, settings: ValueSettings) -> None:
        super().__init__()
        self.settings = settings
        widths = (width, *settings.hidden_sizes)
        layers: list[nn.Module] = [nn.LayerNorm(width)]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.GELU()]
        last = nn.Linear(widths[-1], 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(*layers, last)

    def forward(self, features_BW: Tensor) -> Tensor:
        """``[B]`` values."""
        features_BW = features_BW.detach() if self.settings.detached else features_BW
        values_B: Tensor = self.layers(features_BW.float()).squeeze(-1)
        return values_B
