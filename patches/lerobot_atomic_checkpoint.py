# SPDX-License-Identifier: Apache-2.0
"""Write each checkpoint beside its place and rename it: a crash or a full disk leaves the previous one whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lerobot.utils.constants import TRAINING_STATE_DIR
from safetensors import SafetensorError

from embodix.patching import Patch, replace_attribute
from embodix.training.finished_checkpoint import replace_folder, unfinished_folder
from embodix.training.sharded_resume import write_groups
from embodix.training.stopped import RunStoppedError

if TYPE_CHECKING:
    from embodix.training.background_saving import BackgroundSaver

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
    on_saved: Callable[[Path], None] | None = None,
    on_finished: Callable[[Path], None] | None = None,
    saver: Callable[[], BackgroundSaver | None] | None = None,
) -> Callable[[], None]:
    """Patch upstream's two names.

    Args:
        saver: gives what writes the checkpoints of a run whose ranks each hold a part; None, or what gives None, where
            upstream writes them from a whole policy.
        on_saved: called with the unfinished checkpoint folder after upstream has written it, to add further state.
            Where it fails, upstream's own files stay under the checkpoint's name unless an earlier try of that
            step stands there, `last` stays at the checkpoint before, and the run ends with the reason.
        on_finished: called with the checkpoint folder once it is complete and `last` points at it.
    """
    from lerobot.scripts import lerobot_train
    from lerobot.utils.constants import LAST_CHECKPOINT_LINK

    from embodix.training.checkpoint_evaluation import move_link

    save_in_place = lerobot_train.save_checkpoint

    def background() -> BackgroundSaver | None:
        return None if saver is None else saver()

    def save_beside_and_rename(checkpoint_dir: Path, *args: Any, **kwargs: Any) -> None:
        if (parts := background()) is not None:
            parts.add_hosts_files(lambda folder: _write_without_weights(save_in_place, folder, on_saved, kwargs))
            return
        unfinished = unfinished_folder(checkpoint_dir)
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            save_in_place(unfinished, *args, **kwargs)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise _unwritten(checkpoint_dir, error) from error
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        failure = _failure_of(on_saved, unfinished)
        if failure is not None and checkpoint_dir.exists():
            shutil.rmtree(unfinished)
            raise _unwritten(checkpoint_dir, failure) from failure
        replace_folder(unfinished, checkpoint_dir)
        if failure is not None:
            last = (checkpoint_dir.parent / LAST_CHECKPOINT_LINK).resolve()
            raise _incomplete(checkpoint_dir, last, failure) from failure

    def move_last_link(checkpoint_dir: Path) -> Path:
        if background() is not None:
            return checkpoint_dir.parent / LAST_CHECKPOINT_LINK  # moved once the checkpoint is in its place
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


def _failure_of(on_saved: Callable[[Path], None] | None, unfinished: Path) -> Exception | None:
    """What went wrong where state was added; what was added until then is taken away."""
    if on_saved is None:
        return None
    written = set(unfinished.rglob("*"))
    try:
        on_saved(unfinished)
    except Exception as error:
        for path in sorted(set(unfinished.rglob("*")) - written, reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        return error
    return None


def _unwritten(checkpoint_dir: Path, error: Exception) -> RunStoppedError:
    return RunStoppedError(
        f"The checkpoint {checkpoint_dir} could not be written: {error}. Nothing of this try is left, and the "
        "checkpoints that were there are whole. Make room or choose another disk, then "
        f"`lerobot train resume={checkpoint_dir.parents[1]}`."
    )


def _incomplete(checkpoint_dir: Path, last: Path, failure: Exception) -> RunStoppedError:
    way_on = (
        f"`lerobot train resume={last}` continues from the one before, to the bit"
        if last.is_dir()
        else "no checkpoint stands before it, so begin the run anew to train it to the bit"
    )
    return RunStoppedError(
        f"The checkpoint {checkpoint_dir} is kept, with upstream's own files alone: what embodix adds to it (the "
        f"position in the data, the run's overrides) could not be written: {type(failure).__name__}: {failure}. "
        f"The run ends here. Plain LeRobot loads the checkpoint; {way_on}."
    )


class _WithoutWeights:
    """Stands in for a policy of which no rank has all weights: it saves its config alone."""

    def __init__(self, policy: Any) -> None:
        self.config = policy.config

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(folder)


def _write_without_weights(
    save_in_place: Callable[..., None],
    folder: Path,
    on_saved: Callable[[Path], None] | None,
    arguments: Mapping[str, Any],
) -> None:
    """Upstream's own files but weights and optimizer state, which the ranks write; then further state."""
    save_in_place(folder, **{**arguments, "policy": _WithoutWeights(arguments["policy"]), "optimizer": None})
    write_groups(folder / TRAINING_STATE_DIR, arguments["optimizer"])
    if on_saved is not None:
        on_saved(folder)
