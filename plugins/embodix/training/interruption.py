# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a run trains: the first lets the step end and be saved, the second ends at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

SAME_PRESS_S = 1.0  # a launcher hands a Ctrl-C on that its processes have had from the terminal
ANNOUNCEMENT = b"\nInterrupted: this step is finished and saved. Ctrl-C again ends at once.\n"


class Interruption:
    """Takes the place of Python's handler between ``watch`` and ``release``.

    Attributes:
        requested: whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.requested = False
        self._pressed_at = 0.0
        self._replaced: Any = None

    def watch(self) -> None:
        """Begin; a second call, or one outside of the main thread, does nothing."""
        if self._replaced is None and threading.current_thread() is threading.main_thread():
            self._replaced = signal.signal(signal.SIGINT, self._pressed)

    def release(self) -> None:
        """Put the handler back that was there."""
        if self._replaced is not None:
            signal.signal(signal.SIGINT, self._replaced)
            self._replaced = None

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if self.requested and time.monotonic() - self._pressed_at > SAME_PRESS_S:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested, self._pressed_at = True, time.monotonic()
            os.write(2, ANNOUNCEMENT)  # a handler must not use buffered output


class SaveNow(int):
    """A ``save_freq`` of which every step is a multiple; its value, which the checkpoint records, stays."""

    def __rmod__(self, step: int) -> int:
        return 0


def ignore_in_worker(worker_id: int) -> None:
    """A loader's workers leave Ctrl-C to the process that they work for (``worker_init_fn``)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
