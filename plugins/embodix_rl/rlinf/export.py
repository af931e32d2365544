# SPDX-License-Identifier: Apache-2.0
"""What RLinf trained, as a model folder of LeRobot: `lerobot eval` and `lerobot train` take it like any other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lerobot.utils.constants import PRETRAINED_MODEL_DIR
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from embodix.checkpoints.model_folder import find_model

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
POLICY_PREFIX = "flow.policy."  # of LeRobot's policy in `FlowModel`
HOST_WEIGHTS = "model_state_dict/full_weights.pt"  # rlinf/hybrid_engines/fsdp/strategy/base.py


def export_saved(actor_folder: Path, model: Any) -> Path:
    """Write ``pretrained_model`` beside what RLinf's training worker has just saved.

    Args:
        actor_folder: ``checkpoints/global_step_<n>/actor``.
        model: RLinf's ``actor.model``.
    """
    source = find_model(model.checkpoint)
    source = source.member(source.compose_run(source.policy_type(), []))
    weights = torch.load(actor_folder / HOST_WEIGHTS, map_location="cpu", weights_only=True, mmap=True)
    return export_model(weights, Path(source.model), actor_folder.parent, model.num_action_chunks)


def export_model(weights: Mapping[str, Tensor], base: Path, checkpoint: Path, num_executed: int) -> Path:
    """Write ``pretrained_model`` into a checkpoint folder.

    Processors, sizes and the record of the run that trained the base model are copied from it. The value head is left
    to RLinf's own files, from which training goes on.

    Args:
        weights: the state of a `FlowModel`, whole.
        base: the model folder that training began with.
        checkpoint: gets the folder, in place of one that is there.
        num_executed: action steps of a chunk that were executed; the policy's ``n_action_steps`` from now on.

    Raises:
        ValueError: weights of another policy; the message names the first that are missing.
    """
    trained, metadata = _like(weights, base / WEIGHTS_FILE)
    folder, unfinished = checkpoint / PRETRAINED_MODEL_DIR, checkpoint / f"{PRETRAINED_MODEL_DIR}.unfinished"
    for old in (folder, unfinished):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(base, unfinished, ignore=shutil.ignore_patterns(WEIGHTS_FILE))
    save_file(trained, unfinished / WEIGHTS_FILE, metadata=metadata)
    config = {**json.loads((base / CONFIG_FILE).read_text()), "n_action_steps": num_executed}
    (unfinished / CONFIG_FILE).write_text(json.dumps(config, indent=4) + "\n")
    unfinished.rename(folder)
    return folder


def _like(weights: Mapping[str, Tensor], base_file: Path) -> tuple[dict[str, Tensor], dict[str, str] | None]:
    """The weights that a file holds, by its names and in its types (it leaves out what is tied), and its metadata."""
    with safe_open(base_file, framework="pt") as base:
        names = list(base.keys())
        missing = [name for name in names if f"{POLICY_PREFIX}{name}" not in weights]
        if missing:
            raise ValueError(
                f"{len(missing)} weights of {base_file} are not among the trained ones, {missing[0]} for one: they are "
                "of another policy."
            )
        trained = {name: weights[f"{POLICY_PREFIX}{name}"] for name in names}
        typed = {name: weight.to(base.get_tensor(name).dtype).contiguous() for name, weight in trained.items()}
        return typed, base.metadata()
