# SPDX-License-Identifier: Apache-2.0
"""What a run takes from a checkpoint that ranks wrote, each its part, and the optimizer's settings in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from lerobot.utils.constants import TRAINING_STATE_DIR
from torch import Tensor

from embodix.contracts import Placement
from embodix.parallel.optimizer_state import named_optimizer_state, set_named_optimizer_state, state_like_parameters
from embodix.parallel.sharded_state import FOLDER, holds_sharded_state, load_optimizer_state, load_random_state

GROUPS_FILE = "embodix_optimizer_groups.json"


def write_groups(folder: Path, optimizer: Any) -> None:
    """Keep the settings of an optimizer's groups, such as their learning rates."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    (folder / GROUPS_FILE).write_text(json.dumps(groups, indent=2) + "\n")


def read_groups(folder: Path, optimizer: Any) -> None:
    """Put them back.

    Raises:
        ValueError: the optimizer has another number of groups.
    """
    recorded = json.loads((folder / GROUPS_FILE).read_text())
    if len(recorded) != len(optimizer.param_groups):
        raise ValueError(
            f"{folder / GROUPS_FILE} has the settings of {len(recorded)} groups of parameters, and this run's "
            f"optimizer has {len(optimizer.param_groups)}: another optimizer wrote it."
        )
    for group, settings in zip(optimizer.param_groups, recorded, strict=True):
        group |= {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


def placed_state(policy: Any, optimizer: Any, placement: Placement | None) -> dict[str, Any]:
    """``Placement.state``, of what accelerate has prepared where there is none."""
    if placement is not None:
        return placement.state()
    plain = getattr(optimizer, "optimizer", optimizer)
    return {"model": policy.state_dict(), "optimizer": named_optimizer_state(policy, plain)}


def take_over(checkpoint: Path, policy: Any, optimizer: Any, placement: Placement | None) -> None:
    """The optimizer's state, once the policy is in place; every rank must call.

    Args:
        checkpoint: its folder; nothing happens where upstream wrote it from a whole policy.
        policy, optimizer: as accelerate has prepared them, where there is no placement.

    Raises:
        ValueError: the files are damaged.
    """
    state_folder = checkpoint / TRAINING_STATE_DIR
    if not holds_sharded_state(state_folder):
        return
    folder = state_folder / FOLDER
    if placement is not None:
        placement.load_optimizer(load_optimizer_state(folder, placement.optimizer_template))
        return
    state = load_optimizer_state(folder, state_like_parameters(policy))
    set_named_optimizer_state(policy, getattr(optimizer, "optimizer", optimizer), state)


def own_random_state(checkpoint: Path, accelerator: Accelerator) -> dict[str, Tensor] | None:
    """This rank's random state; None where the checkpoint has only that of the first, or of another number of ranks.

    Raises:
        ValueError: the files are damaged.
    """
    state_folder = checkpoint / TRAINING_STATE_DIR
    if not holds_sharded_state(state_folder):
        return None
    return load_random_state(state_folder / FOLDER, accelerator.process_index, accelerator.num_processes)
