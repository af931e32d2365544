# SPDX-License-Identifier: Apache-2.0
"""Waits that have a deadline and know who waits for whom.

Every wait of the scheduling core goes through `waiting` (or raises the same `WaitTimeout`), so that a stuck run names
its cause, and `current_waits` tells a watchdog what everybody of this process is waiting for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary


class Clock(Protocol):
    """Where the time comes from; every asyncio event loop is one."""

    def time(self) -> float:
        """Seconds since an arbitrary moment, never going back."""
        ...


@dataclass(frozen=True)
class Wait:
    """One wait: `who` waits for `whom` to give `what`, since `since` on the loop's clock, at most `deadline_s`."""

    who: str
    whom: str
    what: str
    since: float
    deadline_s: float

    def describe(self, now: float) -> str:
        """One line for a person, at time `now`."""
        return (
            f"{self.who} waits for {self.whom}: {self.what}, since t={self.since:.3f} s "
            f"({now - self.since:.3f} s of at most {self.deadline_s:g} s)"
        )


class WaitTimeout(TimeoutError):  # noqa: N818  (as its base class)
    """A wait reached its deadline.

    Attributes:
        wait: which one.
    """

    def __init__(self, wait: Wait, now: float) -> None:
        super().__init__(
            f"Deadline passed: {wait.describe(now)}. See whether {wait.whom} is alive or raise the deadline."
        )
        self.wait, self._now = wait, now

    def __reduce__(self) -> tuple[type[WaitTimeout], tuple[Wait, float]]:
        """So that it reaches another process: exceptions are pickled by their message otherwise."""
        return type(self), (self.wait, self._now)


_waits: WeakKeyDictionary[asyncio.Task[Any], list[Wait]] = WeakKeyDictionary()


@asynccontextmanager
async def waiting(who: str, whom: str, what: str, deadline_s: float) -> AsyncIterator[Wait]:
    """The body waits; when it takes longer than `deadline_s` it is cancelled.

    Raises:
        WaitTimeout: the deadline passed; a subclass of TimeoutError.
    """
    loop = asyncio.get_running_loop()
    wait = Wait(who, whom, what, loop.time(), deadline_s)
    try:
        async with asyncio.timeout(deadline_s) as limit:
            with listed(wait):
                yield wait
    except TimeoutError as error:
        if limit.expired() and not isinstance(error, WaitTimeout):
            raise WaitTimeout(wait, loop.time()) from None
        raise


class listed:  # noqa: N801  (a context manager, named like a function)
    """Within the context, `wait` is among `current_waits`, as the running task's innermost one."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self._task = asyncio.current_task()

    def __enter__(self) -> None:
        if self._task is not None:
            _waits.setdefault(self._task, []).append(self._wait)

    def __exit__(self, *exception: object) -> None:
        if self._task is not None:
            _waits[self._task].remove(self._wait)


def current_waits() -> list[Wait]:
    """What the tasks of this process wait for, the longest wait first."""
    return sorted((waits[-1] for waits in _waits.values() if waits), key=lambda wait: (wait.since, wait.who))
