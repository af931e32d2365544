# SPDX-License-Identifier: Apache-2.0
"""A small GR00T-N1.5's assets and processors, made once, and a guard that no test here asks the network."""

from __future__ import annotations

import contextlib
import copy
import functools
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from embodix.patching import patched, replace_attribute
from embodix_groot.assets import BASE_MODEL, AssetSettings, prepare_assets
from embodix_groot.testing import SMALL_ARCHITECTURE

INSTRUCTIONS = ("reach the goal", "press the big red button from above, then wait until the light goes out")
ARCHITECTURE: dict[str, Any] = copy.deepcopy(SMALL_ARCHITECTURE)
ARCHITECTURE["language"]["vocab_size"] = 400  # special tokens, every byte, some words
SETTINGS = AssetSettings(ARCHITECTURE, INSTRUCTIONS, max_state_dim=12, max_action_dim=8, chunk_size=16)


@contextlib.contextmanager
def no_network() -> Iterator[None]:
    """Every attempt to reach a network is an error."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    undo = [replace_attribute(socket.socket, "connect", refuse), replace_attribute(socket, "getaddrinfo", refuse)]
    try:
        yield
    finally:
        for restore in undo:
            restore()


@functools.cache
def assets() -> Path:
    """The folder of ``SETTINGS``; not to be changed."""
    folder = tempfile.mkdtemp(prefix="embodix-groot-assets-")
    return prepare_assets(Path(folder), SETTINGS)


def policy_config(folder: Path | None = None, **fields: Any) -> Any:
    """A ``GrootConfig`` of the small size whose files are in ``folder``."""
    from embodix_groot.testing import groot_policy_config

    folder = folder or assets()
    paths = {"tokenizer_assets_repo": str(folder), "base_model_path": str(folder / BASE_MODEL)}
    return groot_policy_config(image_size=28, **{**paths, **fields})


def processed(
    config: Any, tasks: list[str], camera_is_pad: Any = None, *, language: str | None, flip: bool = False
) -> dict[str, Any]:
    """A raw batch through upstream's preprocessor; ``language`` None leaves the samples patch out.

    ``flip`` gives the cameras in the reverse of the alphabetical order.
    """
    from lerobot.policies.groot.processor_groot import make_groot_pre_post_processors

    patches: dict[str, Any] = {"lerobot_groot_runs": {}}
    if language is not None:
        patches["lerobot_groot_samples"] = {"language": language}
    with patched(patches), no_network():
        preprocess, _ = make_groot_pre_post_processors(config, STATISTICS)
        return preprocess(raw_batch(tasks, camera_is_pad, flip=flip))


STATISTICS = {
    key: {"min": -torch.ones(4), "max": torch.ones(4), "mean": torch.zeros(4), "std": torch.ones(4)}
    for key in ("action", "observation.state")
}
BRIGHTNESS = {"front": 0.2, "gripper": 0.8}


def raw_batch(tasks: list[str], camera_is_pad: Any = None, *, flip: bool = False) -> dict[str, Any]:
    """As a data loader gives it; every image of a camera has one colour, so that it is known again."""
    size = len(tasks)
    names = sorted(BRIGHTNESS, reverse=flip)
    batch: dict[str, Any] = {
        f"observation.images.{name}": torch.full((size, 3, 40, 40), BRIGHTNESS[name]) for name in names
    }
    generator = torch.Generator().manual_seed(0)
    batch["observation.state"] = torch.rand(size, 4, generator=generator)
    batch["action"] = torch.rand(size, 16, 4, generator=generator)
    batch["task"] = tasks
    if camera_is_pad is not None:
        batch["camera_is_pad"] = torch.tensor(camera_is_pad)
    return batch


def valid_ids(batch: dict[str, Any], sample: int) -> list[int]:
    """The prompt of a sample without padding."""
    return batch["eagle_input_ids"][sample][batch["eagle_attention_mask"][sample].bool()].tolist()
