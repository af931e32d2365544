# SPDX-License-Identifier: Apache-2.0
"""The two packers that keep upstream's batch composition: all rows, or valid rows only."""

from __future__ import annotations

import torch
from torch import Tensor

from embodix.packing.layout import PackedLayout, positions_of_valid, require_token_mask


class PaddedPacker:
    """Computes every row, padding included, as upstream does."""

    name = "none"

    def layout(self, valid_BS: Tensor) -> PackedLayout:
        require_token_mask(valid_BS)
        batch_size, padded_length = valid_BS.shape
        valid_V = valid_BS.flatten().nonzero().squeeze(1)
        return PackedLayout(
            rows_N=torch.arange(valid_BS.numel(), device=valid_BS.device),
            lengths=tuple(valid_BS.sum(dim=1).tolist()),
            positions_N=positions_of_valid(valid_BS).flatten(),
            valid_rows_V=None if valid_V.numel() == valid_BS.numel() else valid_V,
            batch_size=batch_size,
            padded_length=padded_length,
        )


class PaddingFreePacker:
    """Computes the valid rows only; samples and their order stay as upstream batched them."""

    name = "padding_free"

    def layout(self, valid_BS: Tensor) -> PackedLayout:
        require_token_mask(valid_BS)
        batch_size, padded_length = valid_BS.shape
        rows_N = valid_BS.flatten().nonzero().squeeze(1)
        return PackedLayout(
            rows_N=rows_N,
            lengths=tuple(valid_BS.sum(dim=1).tolist()),
            positions_N=positions_of_valid(valid_BS).flatten()[rows_N],
            valid_rows_V=None,
            batch_size=batch_size,
            padded_length=padded_length,
        )
