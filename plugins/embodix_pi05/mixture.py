# SPDX-License-Identifier: Apache-2.0
"""Batches of several embodiments as one batch of π0.5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lerobot.configs.policies import PreTrainedConfig

from embodix.data.merging import PaddingMerger, merger_with_slots
from embodix.data.mixture_dataset import Member, image_sizes


def merger_of(policy_cfg: PreTrainedConfig, members: Sequence[Member]) -> PaddingMerger:
    """How batches of these members become one batch."""
    resize = _Resize(policy_cfg.image_resolution) if len(image_sizes(members)) > 1 else None  # type: ignore[attr-defined]
    return merger_with_slots(policy_cfg, members, resize)


@dataclass(frozen=True)
class _Resize:
    """Upstream's own resizing with padding, as ``PI05Policy._preprocess_images`` applies it."""

    resolution: tuple[int, int]

    def __call__(self, images_B3HW: Any) -> Any:
        from lerobot.policies.pi05.modeling_pi05 import resize_with_pad_torch

        if tuple(images_B3HW.shape[2:]) == tuple(self.resolution):
            return images_B3HW
        return resize_with_pad_torch(images_B3HW.permute(0, 2, 3, 1), *self.resolution).permute(0, 3, 1, 2)
