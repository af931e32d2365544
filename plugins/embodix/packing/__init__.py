# SPDX-License-Identifier: Apache-2.0
"""Samples to packed batches: which samples share one, which rows are computed, and where each sample starts."""

from embodix.packing.batches import BatchStream
from embodix.packing.composer import BatchComposer
from embodix.packing.cost import CostModel
from embodix.packing.layout import PackedLayout, Packer, ShapePadder
from embodix.packing.sizes import SampleSizes

__all__ = ["BatchComposer", "BatchStream", "CostModel", "PackedLayout", "Packer", "SampleSizes", "ShapePadder"]
