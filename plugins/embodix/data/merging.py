# SPDX-License-Identifier: Apache-2.0
"""One batch from preprocessed batches of several embodiments, in sample order.

Shape suffixes: B samples, C camera slots, D dimensions of the widest embodiment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodix.data.preprocessing import CAMERA_PAD_KEY, EmbodimentPart


@dataclass(frozen=True)
class EmbodimentShape:
    """What merging knows of an embodiment.

    Attributes:
        slots: the policy slot of each of its cameras, in the order of the columns of its own ``camera_is_pad``.
        action_dim: its action dimensions.
    """

    slots: tuple[str, ...]
    action_dim: int


def common_keys(parts: Sequence[EmbodimentPart]) -> list[str]:
    """Keys that every part has, in the order of the first."""
    return [key for key in parts[0].batch if all(key in part.batch for part in parts)]


def merge_values(values: Sequence[Any], parts: Sequence[EmbodimentPart], width: int | None) -> Any:
    """Per-sample values in sample order; what is no value a sample (a constant of the preprocessor) is the first's."""
    if isinstance(values[0], Tensor):
        wanted = width or max((value.shape[-1] for value in values if value.ndim > 1), default=0)
        return in_order([_padded(value, wanted) for value in values], parts)
    if isinstance(values[0], list):
        merged: list[Any] = [None] * sum(len(part.rows) for part in parts)
        for value, part in zip(values, parts, strict=True):
            for row, item in zip(part.rows, value, strict=True):
                merged[row] = item
        return merged
    return values[0]


def _padded(value: Tensor, width: int) -> Tensor:
    """Zeros behind the last dimension of vectors and sequences; one value a sample stays."""
    if value.ndim < 2 or value.shape[-1] == width:
        return value
    return torch.nn.functional.pad(value, (0, width - value.shape[-1]))


def in_order(values: Sequence[Tensor], parts: Sequence[EmbodimentPart]) -> Tensor:
    """``[B, ...]``: the parts' rows in their places of the batch."""
    if len(values) == 1:
        return values[0]
    places = torch.tensor([row for part in parts for row in part.rows])
    merged = torch.cat(list(values))
    return torch.empty_like(merged).index_copy_(0, places, merged)


def images_in_order(values: Sequence[Tensor], parts: Sequence[EmbodimentPart]) -> Tensor:
    """Images of all samples in sample order: as many a sample as its embodiment has, without those it marks absent."""
    of_row: dict[int, Tensor] = {}
    for value, part in zip(values, parts, strict=True):
        absent = part.batch.get(CAMERA_PAD_KEY)
        counts = [len(value) // len(part.rows)] * len(part.rows) if absent is None else (~absent).sum(1).tolist()
        of_row.update(zip(part.rows, value.split(counts), strict=True))
    return torch.cat([of_row[row] for row in sorted(of_row)])
