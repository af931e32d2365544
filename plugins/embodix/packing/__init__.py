# SPDX-License-Identifier: Apache-2.0
"""Samples to packed batches: which samples share one, which rows are computed, and where each sample starts."""

from embodix.contracts import BatchComposer, Packer, ShapePadder
from embodix.packing.batches import BatchStream
from embodix.packing.layout import PackedLayout
from embodix.packing.sample_cost import CostModel, SampleSizes

__all__ = ["BatchComposer", "BatchStream", "CostModel", "PackedLayout", "Packer", "SampleSizes", "ShapePadder"]
