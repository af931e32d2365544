# SPDX-License-Identifier: Apache-2.0
"""A packer that composes the batches: neighbours in length share one, so that padding would be short.

Shape suffixes: N samples in the order of an epoch.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from embodix.packing import CostModel, PackedLayout, SampleSizes
from embodix.packing.bins import Bins
from embodix.packing.layout import PaddedPacker
from embodix.packing.sample_cost import IntArray


class LengthSortedPacker:
    """Sorts ``window`` samples at a time by length and cuts them into bins of equal number; computes every row."""

    name = "length_sorted"

    def __init__(self, window: int = 64, bins_per_step: int = 1) -> None:
        if window < 1:
            raise ValueError(f"`window` must be at least 1, got {window}.")
        self.window = window
        self.bins_per_step = bins_per_step
        self._padded = PaddedPacker()

    def layout(self, valid_BS: Tensor) -> PackedLayout:
        return self._padded.layout(valid_BS)

    def compose(self, samples_N: IntArray, sizes: SampleSizes, samples_per_bin: float, cost: CostModel) -> Bins:
        window_N = np.arange(samples_N.size) // self.window
        sorted_N = samples_N[np.lexsort((sizes.tokens[samples_N], window_N))]
        count = max(1, round(samples_per_bin))
        return Bins(sorted_N, np.append(np.arange(count, samples_N.size, count), samples_N.size))
