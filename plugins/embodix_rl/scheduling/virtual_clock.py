# SPDX-License-Identifier: Apache-2.0
"""An event loop whose time jumps to the next timer: hours of waiting run in milliseconds, always the same way.

Only what is made of asyncio's own timers, futures and tasks runs on it: no sockets, threads or subprocesses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from embodix_rl.scheduling.waiting import current_waits

MAX_TURNS_AT_ONE_TIME = 1_000_000


class Deadlock(RuntimeError):  # noqa: N818  (the word for it)
    """Every task waits and no timer would end it; the message names them."""


class VirtualLoop(asyncio.BaseEventLoop):
    """`asyncio`'s own loop with a clock that moves only when nothing can run.

    Raises:
        Deadlock: no task can run and no timer is set, or tasks run for ever without waiting.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._num_turns = 0
        self._selector = self  # where the loop would wait for sockets, it asks `select`

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Called once a turn: move the clock to the next timer if nothing is ready."""
        if timeout is None:
            raise Deadlock(self._who_waits("Nothing can run any more"))
        if timeout > 0:
            self._num_turns = 0
            self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
        self._num_turns += 1
        if self._num_turns > MAX_TURNS_AT_ONE_TIME:
            raise Deadlock(self._who_waits(f"{MAX_TURNS_AT_ONE_TIME} turns at t={self._now} s without waiting"))
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        """Wakes a loop that waits for sockets; this one never does."""

    def _who_waits(self, problem: str) -> str:
        named = [wait.describe(self._now) for wait in current_waits()]
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        lines = [f"{task.get_name()} at {_where(task)}" for task in tasks if not task.done()]
        return "\n  ".join([f"{problem} at t={self._now:.3f} s.", *named, *lines])


def _where(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=None)
    if not frames:
        return "its beginning"
    code = frames[-1].f_code
    return f"{code.co_qualname} ({code.co_filename.rsplit('/', 1)[-1]}:{frames[-1].f_lineno})"


def run_virtually[T](main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a virtual clock that begins at 0, and return its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
