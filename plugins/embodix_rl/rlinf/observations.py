# SPDX-License-Identifier: Apache-2.0
"""LeRobot observations in the keys that RLinf carries from environments to policies, and back.

RLinf passes on ``main_images``, ``wrist_images``, ``extra_view_images``, ``states`` and ``task_descriptions``, nothing
else (rlinf/data/embodied_io_struct.py, ``EnvOutput.prepare_observations``). Images travel as uint8: LeRobot's own step
divides by 255, which is undone and done again exactly.

Shape suffixes: B environments, N cameras, H, W image, C channels, S state components.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lerobot.utils.constants import OBS_IMAGE, OBS_IMAGES, OBS_STATE
from torch import Tensor

MAIN, WRIST, EXTRA = "main_images", "wrist_images", "extra_view_images"


def to_host(observation: Mapping[str, Any], cameras: Sequence[str], instructions: Sequence[str]) -> dict[str, Any]:
    """RLinf's observation of a batch.

    Args:
        observation: after LeRobot's ``preprocess_observation`` and the environment's own processor.
        cameras: image keys of the observation, in the order in which they travel.
        instructions: of each environment.

    Raises:
        ValueError: from the third camera on, images of different sizes: they travel as one tensor.
    """
    images = [_bytes(observation[camera]) for camera in cameras]
    host: dict[str, Any] = {"states": observation[OBS_STATE], "task_descriptions": list(instructions)}
    for key, image in zip((MAIN, WRIST), images, strict=False):
        host[key] = image
    if images[2:]:
        if len({image.shape for image in images[2:]}) > 1:
            sizes = {name: tuple(image.shape[1:3]) for name, image in zip(cameras[2:], images[2:], strict=True)}
            raise ValueError(
                f"RLinf carries the third and further cameras as one tensor, so they need one size; got {sizes}."
            )
        host[EXTRA] = torch.stack(images[2:], dim=1)
    return host


def from_host(host: Mapping[str, Any], cameras: Sequence[str]) -> dict[str, Any]:
    """LeRobot's observation of a batch, as `to_host` got it, with ``task``."""
    images: list[Tensor] = [host[key] for key in (MAIN, WRIST)[: len(cameras)]]
    if cameras[2:]:
        images += list(host[EXTRA].unbind(dim=1))
    observation: dict[str, Any] = {
        camera: image.permute(0, 3, 1, 2).contiguous().to(torch.float32) / 255
        for camera, image in zip(cameras, images, strict=True)
    }
    return {**observation, OBS_STATE: host["states"], "task": list(host["task_descriptions"])}


def cameras_of(observation: Mapping[str, Any]) -> list[str]:
    """The image keys of an observation, in their order."""
    return [key for key in observation if key == OBS_IMAGE or key.startswith(f"{OBS_IMAGES}.")]


def _bytes(image_BCHW: Tensor) -> Tensor:
    return (image_BCHW * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
