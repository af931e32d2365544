# SPDX-License-Identifier: Apache-2.0
"""An environment whose failures are ordered: for tests of what runs it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


class FailingEnvironment:
    """RLinf's interface as far as a shard uses it; a chunk step does as its actions say.

    Args:
        first: number of the first episode.
        fails_at: life in which it can't be made: 0 for the first process.
        cfg, num_envs, seed_offset, total_num_processes, worker_info: RLinf's; not used.
    """

    def __init__(self, first: int, fails_at: int | None = None, **host: Any) -> None:
        self.is_start, self._episode, self._life, self._fails_at = True, first, 0, fails_at
        self._fail_if_told()

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin the next episode and tell its number."""
        self._episode += 1
        return {"episode": self._episode, "is_start": self.is_start}, {}

    def chunk_step(self, order: Any) -> Any:
        """Crash, hang or raise when told to; else give the order back."""
        if order == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if order == "exit":
            os._exit(7)
        if order == "hang":
            time.sleep(3600)
        if order == "raise":
            raise IndexError("told to raise")
        return order

    def update_reset_state_ids(self) -> None:
        """Nothing."""

    def progress(self) -> tuple[int, int]:
        """Episode and life."""
        return self._episode, self._life

    def go_on(self, progress: tuple[int, int]) -> None:
        """Behind the episode of the life before."""
        self._episode, self._life = progress[0] + 1, progress[1] + 1
        self._fail_if_told()

    def _fail_if_told(self) -> None:
        if self._fails_at == self._life:
            raise RuntimeError("told to fail while it is made")
