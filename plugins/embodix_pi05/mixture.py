# SPDX-License-Identifier: Apache-2.0
"""Batches of several embodiments as one batch of π0.5.

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

from embodix.data.mixture_dataset import Member, image_sizes
from embodix.data.preprocessing import (
    ACTION_DIMS_KEY,
    CAMERA_PAD_KEY,
    EmbodimentPart,
    EmbodimentShape,
    PreprocessedBatch,
    common_keys,
    in_order,
    merge_values,
)


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


def merger_of(policy_cfg: PreTrainedConfig, members: Sequence[Member]) -> PaddingMerger:
    """How batches of these members become one batch."""
    shapes = [EmbodimentShape(tuple(member.slots.values()), member.action_dim) for member in members]
    widths = {
        "action": max(member.action_dim for member in members),
        "observation.state": max(member.state_dim for member in members),
    }
    slots = [key for key, f in (policy_cfg.input_features or {}).items() if f.type is FeatureType.VISUAL]
    resize = _Resize(policy_cfg.image_resolution) if len(image_sizes(members)) > 1 else None  # type: ignore[attr-defined]
    return PaddingMerger(shapes, slots, widths, resize)


@dataclass(frozen=True)
class _Resize:
    """Upstream's own resizing with padding, as ``PI05Policy._preprocess_images`` applies it."""

    resolution: tuple[int, int]

    def __call__(self, images_B3HW: Any) -> Any:
        from lerobot.policies.pi05.modeling_pi05 import resize_with_pad_torch

        if tuple(images_B3HW.shape[2:]) == tuple(self.resolution):
            return images_B3HW
        return resize_with_pad_torch(images_B3HW.permute(0, 2, 3, 1), *self.resolution).permute(0, 3, 1, 2)
