# SPDX-License-Identifier: Apache-2.0
"""Samples to packed batches: which rows of a padded prefix are computed, and where each sample starts."""

from embodix.packing.layout import PackedLayout, Packer

__all__ = ["PackedLayout", "Packer"]
