# SPDX-License-Identifier: Apache-2.0
"""The layout of a packed prefix.

Shape suffixes: B samples, S rows of the padded prefix of one sample, N rows that are computed, V valid rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedLayout:
    """Which rows of a padded ``[B, S]`` prefix are computed, in which order, and which of them are tokens.

    Attributes:
        rows_N: int64 indices into the flattened ``[B * S]`` prefix, sample by sample, in the order of the prefix.
        lengths: valid tokens of each sample.
        positions_N: int64 position of each computed row among the valid tokens of its sample (what RoPE needs).
        valid_rows_V: int64 indices into the N computed rows of those that are valid tokens; None when all are.
        batch_size: B.
        padded_length: S.
    """

    rows_N: Tensor
    lengths: tuple[int, ...]
    positions_N: Tensor
    valid_rows_V: Tensor | None
    batch_size: int
    padded_length: int

    @property
    def num_valid(self) -> int:
        return sum(self.lengths)

    @property
    def num_computed(self) -> int:
        return self.rows_N.numel()

    def to(self, device: torch.device) -> PackedLayout:
        """The same layout with its index tensors on ``device``."""
        valid_rows_V = self.valid_rows_V
        return PackedLayout(
            rows_N=self.rows_N.to(device, non_blocking=True),
            lengths=self.lengths,
            positions_N=self.positions_N.to(device, non_blocking=True),
            valid_rows_V=None if valid_rows_V is None else valid_rows_V.to(device, non_blocking=True),
            batch_size=self.batch_size,
            padded_length=self.padded_length,
        )


class Packer(Protocol):
    """Decides which rows of a padded batch are computed."""

    name: str

    def layout(self, valid_BS: Tensor) -> PackedLayout:
        """The layout for a bool mask of the tokens that exist.

        Raises:
            ValueError: the mask is not a two-dimensional bool tensor.
        """
        ...


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
