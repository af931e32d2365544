# SPDX-License-Identifier: Apache-2.0
"""The layout of a packed prefix, and the two packers that keep upstream's batch composition: all rows, or valid ones.

Shape suffixes: B samples, S rows of the padded prefix of one sample, N rows that are computed, V valid rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedLayout:
    """Which rows of a padded ``[B, S]`` prefix are computed, in which order, and which of them are tokens.

    A packer for fixed shapes adds blank rows at the end, which stand for no row of the prefix: their index is
    ``blank_row``. They are computed from zeros, attend to nothing and are read by nothing.

    Attributes:
        rows_N: int64 indices into the flattened ``[B * S]`` prefix, sample by sample, in the order of the prefix.
        lengths: valid tokens of each sample.
        positions_N: int64 position of each computed row among the valid tokens of its sample (what RoPE needs).
        valid_rows_V: int64 indices into the N computed rows of those that are valid tokens; None when all are.
        batch_size: B.
        padded_length: S.
        num_samples_computed: samples whose actions are computed, blank ones included; None for B.
        num_images_computed: images that go through the vision tower, blank ones included; None for those needed.
    """

    rows_N: Tensor
    lengths: tuple[int, ...]
    positions_N: Tensor
    valid_rows_V: Tensor | None
    batch_size: int
    padded_length: int
    num_samples_computed: int | None = None
    num_images_computed: int | None = None

    @property
    def blank_row(self) -> int:
        """The index that stands for no row: one past the last."""
        return self.batch_size * self.padded_length

    @property
    def num_blank_samples(self) -> int:
        """Samples computed beyond those of the batch."""
        return 0 if self.num_samples_computed is None else self.num_samples_computed - self.batch_size

    @property
    def computed_lengths(self) -> tuple[int, ...]:
        """Valid tokens of each sample whose actions are computed: 0 for blank ones."""
        return self.lengths + (0,) * self.num_blank_samples

    @property
    def num_valid(self) -> int:
        return sum(self.lengths)

    @property
    def num_computed(self) -> int:
        return self.rows_N.numel()

    def to(self, device: torch.device) -> PackedLayout:
        """The same layout with its index tensors on ``device``."""
        valid_rows_V = self.valid_rows_V
        return replace(
            self,
            rows_N=self.rows_N.to(device, non_blocking=True),
            positions_N=self.positions_N.to(device, non_blocking=True),
            valid_rows_V=None if valid_rows_V is None else valid_rows_V.to(device, non_blocking=True),
        )


def positions_of_valid(valid_BS: Tensor) -> Tensor:
    """Position of each row among the valid rows of its sample, as upstream counts (``cumsum(valid) - 1``)."""
    return torch.cumsum(valid_BS.to(torch.int64), dim=1) - 1


def require_token_mask(valid_BS: Tensor) -> None:
    """Refuse anything but a ``[B, S]`` bool mask."""
    if valid_BS.ndim != 2 or valid_BS.dtype != torch.bool:
        raise ValueError(
            "A packer takes a two-dimensional bool mask [samples, rows], True where a token exists; "
            f"got shape {tuple(valid_BS.shape)} of {valid_BS.dtype}. Convert with mask.bool()."
        )


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
