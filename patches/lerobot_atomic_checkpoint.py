# SPDX-License-Identifier: Apache-2.0
"""Write each checkpoint beside its place and rename it: a crash or a full disk leaves the previous one whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="lerobot_atomic_checkpoint",
    target="lerobot.scripts.lerobot_train.save_checkpoint, update_last_checkpoint",
    requires={"lerobot": ">=0.5.1,<0.5.2"},
    symptom="A run killed while saving leaves a half-written checkpoint under its final name, and between removing "
    "and making the `last` link there is no link at all.",
    upstream="none found; upstream writes in place (lerobot/utils/train_utils.py)",
    why_safe="Upstream's own functions do the writing; only the folder they write into differs.",
    remove_when="upstream writes checkpoints atomically and offers a hook for further state",
)


def apply(
    on_saved: Callable[[Path], None] | None = None, on_finished: Callable[[Path], None] | None = None
) -> Callable[[], None]:
    """Patch upstream's two names.

    Args:
        on_saved: called with the unfinished checkpoint folder after upstream has written it, to add further state.
        on_finished: called with the checkpoint folder once it is complete and `last` points at it.
    """
    from lerobot.scripts import lerobot_train
    from lerobot.utils.constants import LAST_CHECKPOINT_LINK

    from embodix.training.checkpoint_evaluation import move_link

    save_in_place = lerobot_train.save_checkpoint

    def save_beside_and_rename(checkpoint_dir: Path, *args: Any, **kwargs: Any) -> None:
        unfinished = checkpoint_dir.with_name(f".{checkpoint_dir.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            save_in_place(unfinished, *args, **kwargs)
            if on_saved is not None:
                on_saved(unfinished)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        _replace_folder(unfinished, checkpoint_dir)

    def move_last_link(checkpoint_dir: Path) -> Path:
        link = move_link(checkpoint_dir.parent / LAST_CHECKPOINT_LINK, checkpoint_dir)
        if on_finished is not None:
            on_finished(checkpoint_dir)
        return link

    undo_save = replace_attribute(lerobot_train, "save_checkpoint", save_beside_and_rename)
    undo_link = replace_attribute(lerobot_train, "update_last_checkpoint", move_last_link)

    def undo() -> None:
        undo_link()
        undo_save()

    return undo


def _replace_folder(finished: Path, place: Path) -> None:
    """Rename; a checkpoint of the same step from an earlier try is moved aside first and removed last."""
    replaced = place.with_name(f".{place.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if place.exists():
        place.rename(replaced)
    finished.rename(place)
    shutil.rmtree(replaced, ignore_errors=True)
