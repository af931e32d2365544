# SPDX-License-Identifier: Apache-2.0
"""Leave the optimizer's state of a checkpoint that ranks wrote, each its part, to the ranks that read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="lerobot_sharded_resume",
    target="lerobot.scripts.lerobot_train.load_training_state",
    requires={"lerobot": ">=0.5.1,<0.5.2"},
    symptom="Upstream reads the whole optimizer state on every rank, from one file that such a checkpoint has not.",
    upstream="none found; upstream saves and resumes from a whole policy (lerobot/utils/train_utils.py)",
    why_safe="Step, schedule and random state are read by upstream's own functions; the optimizer's state is read once "
    "the policy is in place, before the first step.",
    remove_when="upstream resumes distributed checkpoints",
)


def apply(read_groups: Callable[[Path, Any], None]) -> Callable[[], None]:
    """Patch upstream's name; returns the undo.

    Args:
        read_groups: puts the learning rates and other settings of the checkpoint's ``training_state`` folder into an
            optimizer.
    """
    from lerobot.optim.schedulers import load_scheduler_state
    from lerobot.scripts import lerobot_train
    from lerobot.utils.constants import TRAINING_STATE_DIR
    from lerobot.utils.random_utils import load_rng_state
    from lerobot.utils.train_utils import load_training_step

    def load_without_optimizer_state(checkpoint_dir: Path, optimizer: Any, scheduler: Any) -> tuple[int, Any, Any]:
        folder = checkpoint_dir / TRAINING_STATE_DIR
        load_rng_state(folder)
        read_groups(folder, optimizer)
        if scheduler is not None:
            scheduler = load_scheduler_state(scheduler, folder)
        return load_training_step(folder), optimizer, scheduler

    return replace_attribute(lerobot_train, "load_training_state", load_without_optimizer_state)
