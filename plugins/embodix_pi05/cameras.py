# SPDX-License-Identifier: Apache-2.0
"""Which cameras of a batch are real, sample by sample.

Shape suffixes: B samples, C camera slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodix.data.preprocessing import CAMERA_PAD_KEY
from embodix.policies.installation import nearest

IMAGE_PREFIX = "observation.image"


@dataclass(frozen=True)
class CameraBatch:
    """Preprocessed images of every slot, and which exist.

    Attributes:
        images: one ``[B, 3, H, W]`` tensor a slot in upstream's order: cameras in the batch, then missing ones.
        present_BC: bool, on the host: the image of this sample and slot is real.
        num_present: slots that are in the batch; the others are blank for every sample.
    """

    images: list[Tensor]
    present_BC: Tensor
    num_present: int


def collect_cameras(policy: Any, batch: Mapping[str, Any], camera_names: tuple[str, ...] | None = None) -> CameraBatch:
    """Preprocess the images with upstream's own method and find out which are real.

    Raises:
        ValueError: a camera of the batch that the policy does not know, a ``camera_is_pad`` that does not fit, or a
            sample without any camera.
    """
    slots = list(policy.config.image_features)
    _require_known_cameras(slots, batch)
    present = [key for key in slots if key in batch]
    images, _ = policy._preprocess_images(batch)
    present_BC = torch.zeros(images[0].shape[0], len(slots), dtype=torch.bool)
    present_BC[:, : len(present)] = True
    if CAMERA_PAD_KEY in batch:
        present_BC[:, : len(present)] &= ~_camera_is_pad(batch[CAMERA_PAD_KEY], present, camera_names)
    blind = (~present_BC.any(dim=1)).nonzero().flatten().tolist()
    if blind:
        raise ValueError(
            f"Every sample needs one camera at least; {CAMERA_PAD_KEY} marks all cameras absent for samples "
            f"{blind} of the batch. Remove those frames from the dataset."
        )
    return CameraBatch(images, present_BC, len(present))


def _require_known_cameras(slots: list[str], batch: Mapping[str, Any]) -> None:
    found = [
        key
        for key, value in batch.items()
        if key.startswith(IMAGE_PREFIX) and not key.endswith("_is_pad") and isinstance(value, Tensor)
    ]
    unknown = [key for key in found if key not in slots]
    if unknown or not any(key in slots for key in found):
        hints = "".join(f" {key!r} is nearest to {nearest(key, slots)!r}." for key in unknown)
        raise ValueError(
            "Cameras are matched by name, and every camera of the batch must be one of the policy's.\n"
            f"  policy (config.image_features): {', '.join(slots) or 'none'}\n"
            f"  batch: {', '.join(found) or 'none'}\n"
            f"  unknown to the policy: {', '.join(unknown) or 'none'}.{hints} "
            "Rename the camera in the dataset or in the policy's input_features."
        )


def _camera_is_pad(mask: Tensor, present: list[str], camera_names: tuple[str, ...] | None) -> Tensor:
    """``[B, C']`` on the host, columns in the order of ``present``; cameras without a column are never absent."""
    names = list(camera_names) if camera_names is not None else present
    mask_BC = mask.detach().to("cpu", torch.bool)
    if mask_BC.ndim != 2 or mask_BC.shape[1] != len(names):
        raise ValueError(
            f"{CAMERA_PAD_KEY} needs one column a camera; got shape {tuple(mask_BC.shape)} for "
            f"{len(names)} cameras: {', '.join(names)}."
        )
    stray = [name for name in names if name not in present]
    if stray:
        raise ValueError(
            f"{CAMERA_PAD_KEY} has columns for {', '.join(stray)}, which are not in the batch; "
            f"the batch has {', '.join(present)}."
        )
    columns = {name: mask_BC[:, index] for index, name in enumerate(names)}
    never = torch.zeros(mask_BC.shape[0], dtype=torch.bool)
    return torch.stack([columns.get(name, never) for name in present], dim=1)
