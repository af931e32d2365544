# SPDX-License-Identifier: Apache-2.0
"""One batch from preprocessed batches of several embodiments, in sample order.

Shape suffixes: B samples, C camera slots, D dimensions of the widest embodiment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import FeatureType
from torch import Tensor

from embodix.data.mixture_dataset import Member
from embodix.data.preprocessing import ACTION_DIMS_KEY, CAMERA_PAD_KEY, EmbodimentPart, PreprocessedBatch


@dataclass(frozen=True)
class EmbodimentShape:
    """What merging knows of an embodiment.

    Attributes:
        slots: the policy slot of each of its cameras, in the order of the columns of its own ``camera_is_pad``.
        action_dim: its action dimensions.
    """

    slots: tuple[str, ...]
    action_dim: int


@dataclass(frozen=True)
class PaddingMerger:
    """Absent cameras are blank and marked, vectors are padded with zeros to the widest embodiment.

    Args:
        shapes: of each embodiment.
        slots: the policy's camera slots in its order.
        widths: key -> size of the last dimension in every batch, whatever embodiments it holds.
        resize: brings images to the policy's resolution; None where all embodiments have images of one size.
    """

    shapes: Sequence[EmbodimentShape]
    slots: Sequence[str]
    widths: Mapping[str, int] = field(default_factory=dict)
    resize: Callable[[Tensor], Tensor] | None = None

    def __call__(self, parts: Sequence[EmbodimentPart]) -> PreprocessedBatch:
        present = [slot for slot in self.slots if any(slot in self.shapes[part.embodiment].slots for part in parts)]
        batch = PreprocessedBatch()
        for slot in present:
            batch[slot] = self._images(slot, parts)
        for key in common_keys(parts):
            if key not in self.slots and key != CAMERA_PAD_KEY:
                batch[key] = merge_values([part.batch[key] for part in parts], parts, self.widths.get(key))
        batch[CAMERA_PAD_KEY] = in_order([self._absent(part, present) for part in parts], parts)
        dims = [torch.full((len(part.rows),), self.shapes[part.embodiment].action_dim) for part in parts]
        batch[ACTION_DIMS_KEY] = in_order(dims, parts)
        return batch

    def _images(self, slot: str, parts: Sequence[EmbodimentPart]) -> Tensor:
        real = {part.embodiment: self._sized(part.batch[slot]) for part in parts if slot in part.batch}
        like = next(iter(real.values()))
        blank = {part.embodiment: like.new_zeros(len(part.rows), *like.shape[1:]) for part in parts}
        return in_order([real.get(part.embodiment, blank[part.embodiment]) for part in parts], parts)

    def _sized(self, images: Tensor) -> Tensor:
        return images if self.resize is None else self.resize(images)

    def _absent(self, part: EmbodimentPart, present: Sequence[str]) -> Tensor:
        """``[B, C]``: slots the embodiment lacks, and frames its own dataset marks."""
        shape = self.shapes[part.embodiment]
        absent_BC = torch.tensor([slot not in shape.slots for slot in present]).repeat(len(part.rows), 1)
        own = part.batch.get(CAMERA_PAD_KEY)
        if own is not None:
            for column, slot in enumerate(shape.slots):
                absent_BC[:, present.index(slot)] |= own[:, column].to(torch.bool)
        return absent_BC


def merger_with_slots(
    policy_cfg: PreTrainedConfig, members: Sequence[Member], resize: Callable[[Tensor], Tensor] | None = None
) -> PaddingMerger:
    """How batches of these members become one batch of a policy with named camera slots and padded vectors."""
    shapes = [EmbodimentShape(tuple(member.slots.values()), member.action_dim) for member in members]
    widths = {
        "action": max(member.action_dim for member in members),
        "observation.state": max(member.state_dim for member in members),
    }
    slots = [key for key, f in (policy_cfg.input_features or {}).items() if f.type is FeatureType.VISUAL]
    return PaddingMerger(shapes, slots, widths, resize)


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
