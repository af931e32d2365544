# SPDX-License-Identifier: Apache-2.0
"""Packers that also compose the batches, and the plain composition by number.

A packer composes batches when it has the two members of :class:`BatchComposer`; nothing else registers it. A packer
without them leaves the composition of batches to upstream's sampler.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from embodix.packing.bins import Bins
from embodix.packing.cost import CostModel
from embodix.packing.sizes import IntArray, SampleSizes


@runtime_checkable
class BatchComposer(Protocol):
    """Decides which samples share a bin (a micro-batch).

    Attributes:
        bins_per_step: bins of one optimizer step on each rank.
    """

    bins_per_step: int

    def compose(self, samples_N: IntArray, sizes: SampleSizes, samples_per_bin: float, cost: CostModel) -> Bins:
        """Bins that hold each of ``samples_N`` exactly once, a function of the arguments alone.

        Args:
            samples_N: int64 dataset indices of one epoch, in its order.
            sizes: of every sample of the data set.
            samples_per_bin: samples that a bin should hold on average where no budget is set.
            cost: the cost model in force, in token units.

        Raises:
            ValueError: a sample that no bin can hold.
        """
        ...


class FixedCountComposer:
    """The same number of samples in every bin, the last of an epoch excepted."""

    def __init__(self, bins_per_step: int = 1) -> None:
        self.bins_per_step = require_bins_per_step(bins_per_step)

    def compose(self, samples_N: IntArray, sizes: SampleSizes, samples_per_bin: float, cost: CostModel) -> Bins:
        """Consecutive samples, ``samples_per_bin`` rounded to a whole number at a time."""
        count = max(1, round(samples_per_bin))
        ends_K = np.append(np.arange(count, samples_N.size, count), samples_N.size).astype(np.int64)
        return Bins(samples_N, ends_K)


def require_bins_per_step(bins_per_step: int) -> int:
    """The number itself.

    Raises:
        ValueError: below one.
    """
    if bins_per_step < 1:
        raise ValueError(f"A step takes one bin a rank at least; got packing.options.bins_per_step={bins_per_step}.")
    return bins_per_step
