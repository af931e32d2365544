# SPDX-License-Identifier: Apache-2.0
"""A packer for kernels and compilers that like few different shapes.

Shape suffixes: B samples, S rows of the padded prefix of one sample, N computed rows, V valid rows.
"""

from __future__ import annotations

from torch import Tensor

from embodix.packing import PackedLayout
from embodix.packing.layout import positions_of_valid, require_token_mask


class BucketedPacker:
    """Computes the valid rows and as many padding rows as bring their number to a multiple of ``multiple``.

    Where the batch has too little padding for the next multiple, all of it is computed.
    """

    name = "bucketed"

    def __init__(self, multiple: int = 64) -> None:
        if multiple < 1:
            raise ValueError(f"`multiple` must be at least 1, got {multiple}; 64 suits most kernels.")
        self.multiple = multiple

    def layout(self, valid_BS: Tensor) -> PackedLayout:
        require_token_mask(valid_BS)
        kept = valid_BS.flatten().clone()
        num_missing = -int(kept.sum()) % self.multiple
        kept[(~kept).nonzero().squeeze(1)[:num_missing]] = True
        rows_N = kept.nonzero().squeeze(1)
        valid_N = valid_BS.flatten()[rows_N]
        return PackedLayout(
            rows_N=rows_N,
            lengths=tuple(valid_BS.sum(dim=1).tolist()),
            positions_N=positions_of_valid(valid_BS).flatten()[rows_N],
            valid_rows_V=None if bool(valid_N.all()) else valid_N.nonzero().squeeze(1),
            batch_size=valid_BS.shape[0],
            padded_length=valid_BS.shape[1],
        )
