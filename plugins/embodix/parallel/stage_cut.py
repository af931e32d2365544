# SPDX-License-Identifier: Apache-2.0
"""Where the layers of a policy are cut into stages: each holds layers that follow each other, one at least.

A step takes as long as its slowest stage, and a rank needs the memory of the largest, so the cut with the smallest sum
of these two shares is taken. The first stage often has the embeddings, and then fewer layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PartCost:
    """What a part of a policy weighs.

    Attributes:
        parameters: that it holds.
        operations: of a forward pass, in any unit that all parts share.
    """

    parameters: int
    operations: int

    def __add__(self, other: PartCost) -> PartCost:
        return PartCost(self.parameters + other.parameters, self.operations + other.operations)


def balanced_cut(first: PartCost, layers: Sequence[PartCost], last: PartCost, num_stages: int) -> tuple[range, ...]:
    """The layers of each stage.

    Args:
        first: what the first stage has before its layers.
        last: what the last stage has after them.

    Raises:
        ValueError: fewer layers than stages.
    """
    if len(layers) < num_stages:
        raise ValueError(
            f"A stage of a pipeline has one layer at least; got {num_stages} stages for {len(layers)} layers. Set "
            f"parallel.options.size to {len(layers)} or less."
        )
    cuts = itertools.combinations(range(1, len(layers)), num_stages - 1)
    stages = [tuple(itertools.starmap(range, itertools.pairwise((0, *cut, len(layers))))) for cut in cuts]
    return min(stages, key=lambda ranges: _largest_shares(first, layers, last, ranges))


def _largest_shares(first: PartCost, layers: Sequence[PartCost], last: PartCost, ranges: Sequence[range]) -> float:
    weights = [sum((layers[index] for index in own), PartCost(0, 0)) for own in ranges]
    weights[0] += first
    weights[-1] += last
    total = sum(weights, PartCost(0, 0))
    largest_share = max(weight.parameters for weight in weights) / max(1, total.parameters)
    return largest_share + max(weight.operations for weight in weights) / max(1, total.operations)
