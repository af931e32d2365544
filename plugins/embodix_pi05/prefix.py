# SPDX-License-Identifier: Apache-2.0
"""The packed prefix: which cameras are real, and image and language tokens of every sample without what does not exist.

Shape suffixes: B samples, C camera slots, P tokens an image, L language tokens (padded), S = C * P + L rows of one
padded prefix, N computed rows, X embedded rows before they are put in order, D width of the language model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embodix.contracts import ShapePadder
from embodix.data.preprocessing import CAMERA_PAD_KEY
from embodix.packing.layout import PackedLayout
from embodix.policies.installation import nearest
from embodix.policies.settings import FastPathSettings

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


def collect_cameras(policy: Any, batch: Mapping[str, Any]) -> CameraBatch:
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
        present_BC[:, : len(present)] &= ~_camera_is_pad(batch[CAMERA_PAD_KEY], present)
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


def _camera_is_pad(mask: Tensor, present: list[str]) -> Tensor:
    """``[B, C']`` on the host, columns in the order of ``present``."""
    mask_BC = mask.detach().to("cpu", torch.bool)
    if mask_BC.ndim != 2 or mask_BC.shape[1] != len(present):
        raise ValueError(
            f"{CAMERA_PAD_KEY} needs one column a camera; got shape {tuple(mask_BC.shape)} for "
            f"{len(present)} cameras: {', '.join(present)}."
        )
    return mask_BC


@dataclass(frozen=True)
class PrefixPlan:
    """What to embed, and where each embedded row goes. Index tensors are on the model's device.

    Attributes:
        layout: the packer's decision.
        images: ``[I, 3, H, W]`` batches, one vision-tower call each; the last may end in blank images.
        num_blank_images: blank images at the end, whose tokens nothing reads.
        tokens: language ids to embed, one dimension.
        sources_N: row of the embedded ``[X, D]`` table for each computed row; X itself means "blank, zeros".
        needs_blank: some computed rows have no embedding (padding kept for a camera that was not computed).
    """

    layout: PackedLayout
    images: list[Tensor]
    tokens: Tensor
    sources_N: Tensor
    needs_blank: bool
    num_blank_images: int = 0

    @property
    def num_images(self) -> int:
        """Images that go through the vision tower, blank ones included."""
        return sum(batch.shape[0] for batch in self.images)


def plan_prefix(
    policy: Any,
    cameras: CameraBatch,
    tokens_BL: Tensor,
    token_mask_BL: Tensor,
    settings: FastPathSettings,
    fixed_shapes: bool = False,
) -> PrefixPlan:
    """Decide on the host what is computed; one transfer of the masks, no other wait for the device.

    Args:
        fixed_shapes: let the packer fill the layout up to one of its shapes, if it has any.
    """
    device = cameras.images[0].device
    num_patches = patches_per_image(policy)
    mask_BL = token_mask_BL.detach().to("cpu", torch.bool)
    valid_BS = torch.cat([cameras.present_BC.repeat_interleave(num_patches, dim=1), mask_BL], dim=1)
    layout = settings.packer.layout(valid_BS)

    computed_BC = torch.ones_like(cameras.present_BC)
    if settings.vision_tokens == "valid":
        computed_BC = cameras.present_BC
    images = _image_batches(cameras, settings.vision_tokens, device)
    num_blank_images = 0
    if fixed_shapes and isinstance(settings.packer, ShapePadder):
        num_real = int(computed_BC.sum()) if settings.vision_tokens == "valid" else 0
        layout = settings.packer.pad(layout, num_real)
        images, num_blank_images = _with_blank_images(images, num_real, layout.num_images_computed)
    kept_BL = torch.zeros(valid_BS.numel() + 1, dtype=torch.bool)
    kept_BL[layout.rows_N] = True
    kept_BL = kept_BL[: layout.blank_row].view(valid_BS.shape)[:, cameras.present_BC.shape[1] * num_patches :]

    sources_BS, num_rows = _sources(computed_BC, kept_BL, num_patches)
    sources_N = torch.cat([sources_BS.flatten(), torch.tensor([num_rows])])[layout.rows_N]
    return PrefixPlan(
        layout=layout.to(device),
        images=images,
        tokens=tokens_BL.to(device).flatten()[_indices(kept_BL, device)],
        sources_N=sources_N.to(device),
        needs_blank=bool((sources_N == num_rows).any()),
        num_blank_images=num_blank_images,
    )


def _with_blank_images(images: list[Tensor], num_real: int, num_computed: int | None) -> tuple[list[Tensor], int]:
    """One batch of real images filled up to the number of the shape; upstream's batches a slot stay as they are."""
    if not num_real or num_computed is None:
        return images, 0
    num_blank = num_computed - num_real
    return [F.pad(images[0], (0, 0, 0, 0, 0, 0, 0, num_blank))], num_blank


def patches_per_image(policy: Any) -> int:
    """Tokens that one image becomes."""
    tower = policy.model.paligemma_with_expert.paligemma.model.vision_tower
    return int(tower.vision_model.embeddings.num_patches)


def _indices(mask: Tensor, device: torch.device) -> Tensor:
    return mask.flatten().nonzero().squeeze(1).to(device)


def _image_batches(cameras: CameraBatch, vision_tokens: str, device: torch.device) -> list[Tensor]:
    """Images a vision-tower call: all slots one by one as upstream, or the real images in one call, slot by slot."""
    if vision_tokens == "upstream":
        return cameras.images
    real = []
    for slot in range(cameras.num_present):
        present_B = cameras.present_BC[:, slot]
        image = cameras.images[slot]
        real.append(image if bool(present_B.all()) else image[_indices(present_B, device)])
    return [torch.cat(real)]


def _sources(computed_BC: Tensor, kept_BL: Tensor, num_patches: int) -> tuple[Tensor, int]:
    """``[B, S]`` index into the embedded rows (images slot by slot, then language), and the number of those rows."""
    num_images = int(computed_BC.sum())
    image_rank_BC = _ranks(computed_BC.t()).t()
    patches_P = torch.arange(num_patches)
    image_rows_BCP = image_rank_BC[..., None] * num_patches + patches_P
    num_rows = num_images * num_patches + int(kept_BL.sum())
    image_rows_BCP = torch.where(computed_BC[..., None], image_rows_BCP, num_rows)
    language_rows_BL = num_images * num_patches + _ranks(kept_BL)
    return torch.cat([image_rows_BCP.flatten(1), language_rows_BL], dim=1), num_rows


def _ranks(mask: Tensor) -> Tensor:
    """Running number of the True entries in row-major order; meaningless elsewhere."""
    return (torch.cumsum(mask.flatten().to(torch.int64), dim=0) - 1).view(mask.shape)


def embed_prefix(policy: Any, plan: PrefixPlan) -> Tensor:
    """``[N, D]`` embedded rows in packed order, through upstream's own embedding methods."""
    model = policy.model
    with_expert = model.paligemma_with_expert
    images = [model._apply_checkpoint(with_expert.embed_image, image) for image in plan.images]
    images[-1] = images[-1][: images[-1].shape[0] - plan.num_blank_images]
    rows = [image.flatten(0, 1) for image in images]

    def embed_language(tokens: Tensor) -> Tensor:
        embedded = with_expert.embed_language_tokens(tokens)
        return embedded * math.sqrt(embedded.shape[-1])

    rows.append(model._apply_checkpoint(embed_language, plan.tokens))
    if plan.needs_blank:
        rows.append(torch.zeros_like(rows[-1][:1]) if rows[-1].shape[0] else torch.zeros_like(rows[0][:1]))
    return torch.cat(rows).index_select(0, plan.sources_N)
