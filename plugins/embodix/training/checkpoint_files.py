# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint, looked at before anything is built: each is there and whole, or named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lerobot.configs.train import TRAIN_CONFIG_NAME
from lerobot.utils.constants import (
    OPTIMIZER_PARAM_GROUPS,
    OPTIMIZER_STATE,
    POLICY_PREPROCESSOR_DEFAULT_NAME,
    PRETRAINED_MODEL_DIR,
    RNG_STATE,
    SCHEDULER_STATE,
    TRAINING_STATE_DIR,
    TRAINING_STEP,
)
from safetensors import SafetensorError, safe_open

from embodix.parallel.sharded_state import holds_sharded_state
from embodix.training.sharded_resume import GROUPS_FILE

CONFIG_FILE, PREPROCESSOR_FILE = "config.json", f"{POLICY_PREPROCESSOR_DEFAULT_NAME}.json"


def require_whole(checkpoint: Path) -> None:
    """Open every file that a resumed run reads.

    Raises:
        ValueError: one is missing or damaged; the message names it, the rule and the checkpoint before.
    """
    for path in _required(checkpoint):
        if not path.is_file():
            raise ValueError(_refusal(checkpoint, path, "is missing"))
    for path in sorted(checkpoint.rglob("*")):
        fault = _fault(path)
        if fault is not None:
            raise ValueError(_refusal(checkpoint, path, fault))


def _required(checkpoint: Path) -> Iterator[Path]:
    model, state = checkpoint / PRETRAINED_MODEL_DIR, checkpoint / TRAINING_STATE_DIR
    yield from (model / name for name in (CONFIG_FILE, TRAIN_CONFIG_NAME))
    optimizer = (GROUPS_FILE,) if holds_sharded_state(state) else (OPTIMIZER_STATE, OPTIMIZER_PARAM_GROUPS)
    yield from (state / name for name in (TRAINING_STEP, RNG_STATE, *optimizer))
    if _json(model / TRAIN_CONFIG_NAME).get("scheduler") is not None:
        yield state / SCHEDULER_STATE
    yield model / PREPROCESSOR_FILE
    steps = _json(model / PREPROCESSOR_FILE).get("steps", [])
    yield from (model / step["state_file"] for step in steps if "state_file" in step)


def _json(path: Path) -> dict[str, Any]:
    """A file's mapping; nothing where it is missing or damaged, which is said of the file itself."""
    content = json.loads(path.read_bytes()) if path.is_file() and _fault(path) is None else {}
    return content if isinstance(content, dict) else {}


def _fault(path: Path) -> str | None:
    """What is wrong with a file, None for nothing."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                return None
        if path.suffix == ".json":
            json.loads(path.read_bytes())
    except (SafetensorError, ValueError) as error:
        return f"is cut off or damaged ({error})"
    return None


def _refusal(checkpoint: Path, path: Path, fault: str) -> str:
    earlier = sorted(folder for folder in checkpoint.parent.glob("[0-9]*") if folder.name < checkpoint.name)
    other = f"resume={earlier[-1]}" if earlier else "start another run"
    return (
        f"{path} {fault}. A run is resumed with everything that its checkpoint saved. Copy the checkpoint again, or "
        f"{other}."
    )
