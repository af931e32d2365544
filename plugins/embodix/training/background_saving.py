# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of which every rank writes its part while training goes on, complete or not there at all.

A checkpoint grows in ``.<name>.unfinished`` beside its place. The ranks write their parts in the background; the first
rank adds upstream's own files, then, when all parts are there, the policy's weights as upstream's
``model.safetensors``, one tensor at a time, and renames the folder. A run killed before that leaves the checkpoint
before, and ``last`` on it.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from lerobot.utils.constants import LAST_CHECKPOINT_LINK, PRETRAINED_MODEL_DIR, TRAINING_STATE_DIR
from lerobot.utils.random_utils import serialize_rng_state

from embodix.contracts import ParallelStrategy
from embodix.parallel.sharded_state import FOLDER, begin_saving, export_model
from embodix.tensor_file import WEIGHTS_FILE
from embodix.training.checkpoint_evaluation import move_link
from embodix.training.finished_checkpoint import replace_folder, unfinished_folder
from embodix.training.stopped import RunStoppedError


class BackgroundSaver:
    """Saves the checkpoints of one run, one at a time.

    Args:
        accelerator: of the run; ``process_index`` counts the ranks that have samples of their own.
        most_failures: checkpoints in a row that may fail before the run ends.
        on_finished: called in the first rank, between two steps, with each checkpoint that is in its place.
    """

    def __init__(self, accelerator: Accelerator, most_failures: int, on_finished: Callable[[Path], None]) -> None:
        self._accelerator, self._most_failures, self._on_finished = accelerator, most_failures, on_finished
        grouped = dist.is_available() and dist.is_initialized()
        self._group = dist.new_group(backend="gloo") if grouped else None
        self._place: Path | None = None
        self._saving: Future[Any] | None = None
        self._finishing: threading.Thread | None = None
        self._failure: str | None = None
        self._num_failures = 0
        self._finished: list[Path] = []

    def begin(self, place: Path, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Let every rank write its part of a checkpoint; waits for the one before. Every rank must call.

        Args:
            place: the checkpoint's folder, when it is complete.
            state: of ``Placement.state``.

        Raises:
            RunStoppedError: too many checkpoints could not be written.
        """
        self.settle()
        self._place, self._failure = place, None
        unfinished = unfinished_folder(place)
        if self._accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
            self._guarded(lambda: (unfinished / TRAINING_STATE_DIR / FOLDER).mkdir(parents=True))
        self._accelerator.wait_for_everyone()
        self._guarded(lambda: self._begin_own_part(unfinished / TRAINING_STATE_DIR / FOLDER, state))

    def _begin_own_part(self, folder: Path, state: Mapping[str, Mapping[str, Any]]) -> None:
        index = self._accelerator.process_index
        self._saving = begin_saving(state, serialize_rng_state(), index, folder, self._group)

    def add_hosts_files(self, write: Callable[[Path], None]) -> None:
        """Let upstream write its own files, and finish the checkpoint in the background; in the first rank."""
        assert self._place is not None
        unfinished = unfinished_folder(self._place)
        self._guarded(lambda: write(unfinished))
        self._finishing = threading.Thread(target=self._guarded, args=(self._finish,), name="checkpoint", daemon=True)
        self._finishing.start()

    def _finish(self) -> None:
        assert self._place is not None
        if self._saving is not None:
            self._saving.result()
        if self._failure is not None:
            return
        unfinished = unfinished_folder(self._place)
        export_model(unfinished / TRAINING_STATE_DIR / FOLDER, unfinished / PRETRAINED_MODEL_DIR / WEIGHTS_FILE)
        replace_folder(unfinished, self._place)
        move_link(self._place.parent / LAST_CHECKPOINT_LINK, self._place)
        self._finished.append(self._place)

    def _guarded(self, action: Callable[[], Any]) -> None:
        """A checkpoint that can't be written is no reason to lose the run: what went wrong is kept and said later."""
        try:
            action()
        except Exception as error:
            self._failure = self._failure or f"{type(error).__name__}: {error}"

    def tell(self) -> None:
        """Tell of the checkpoints that are in their places since the last call; in the first rank."""
        while self._finished:
            self._on_finished(self._finished.pop(0))

    def settle(self, last: bool = False) -> None:
        """Wait until the last checkpoint is in its place, or given up. Every rank must call.

        Args:
            last: no other checkpoint comes.

        Raises:
            RunStoppedError: too many checkpoints could not be written, or the last one.
        """
        self.wait()
        if self._place is None:
            return
        place, self._place = self._place, None
        failures = [self._failure] if self._group is None else gather_object([self._failure])
        failure = next((failure for failure in failures if failure is not None), None)
        self.tell()
        if failure is None:
            self._num_failures = 0
            return
        self._num_failures += 1
        if self._accelerator.is_main_process:
            shutil.rmtree(unfinished_folder(place), ignore_errors=True)
        ends = last or self._num_failures > self._most_failures
        message = _unwritten(place, failure, self._num_failures, None if ends else self._most_failures)
        if ends:
            raise RunStoppedError(message)
        if self._accelerator.is_main_process:
            logging.error("%s", message)

    def wait(self) -> None:
        """Wait for this rank's part and, in the first, for what it adds; what fails is kept for ``settle``."""
        saving, self._saving = self._saving, None
        if saving is not None:
            self._guarded(saving.result)
        if self._finishing is not None:
            self._finishing.join()
            self._finishing = None


def _unwritten(place: Path, failure: str, num_failures: int, most: int | None) -> str:
    so_far = f"The checkpoint {place} could not be written: {failure}. Nothing of it is left, the ones before are whole"
    if most is not None:
        return f"{so_far}, and the run goes on ({num_failures} in a row; checkpoint.most_failures={most} are borne)."
    return (
        f"{so_far}. The run ends here ({num_failures} in a row). Make room or choose another disk, then "
        f"`lerobot train resume={place.parents[1]}`."
    )


def saves_parts(settings: Mapping[str, Any], strategy: ParallelStrategy) -> bool:
    """Whether each rank writes its part of a checkpoint.

    Args:
        settings: the config's ``checkpoint``.
    """
    if settings["format"] == "auto":
        return not strategy.keeps_whole
    return bool(settings["format"] == "sharded")
