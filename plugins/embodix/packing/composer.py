# SPDX-License-Identifier: Apache-2.0
"""Packers that also compose the batches, and the plain composition by number.

A packer composes batches when it has the two members of :class:`BatchComposer`; nothing else registers it. A packer
without them leaves the composition of batches to upstream's sampler.
"""

from __future__ import annotations

import numpy as np

from embodix.packing.bins import Bins
from embodix.packing.cost import CostModel
from embodix.packing.sizes import IntArray, SampleSizes


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
