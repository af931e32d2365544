# SPDX-License-Identifier: Apache-2.0
"""The components of a run for the conductor: calls of RLinf's worker groups, the gate, and evaluations beside training.

A call of a worker group is anything with ``wait()``, which returns the results of all ranks, and ``done()``, which is
False where a worker failed (rlinf/scheduler/worker/worker_group.py, ``WorkerGroupFuncResult``).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from embodix_rl.rlinf.hosts import WorkerFailedError
from embodix_rl.scheduling.protocol import DrainMode

Call = Callable[[], Any]


async def finished(call: Any, who: str) -> Any:
    """The results of a call of a worker group.

    It is waited for in a daemon's thread: one that never comes back must not keep this process.

    Raises:
        WorkerFailedError: a worker failed.
    """
    loop = asyncio.get_running_loop()
    came: asyncio.Future[Any] = loop.create_future()

    def tell(results: Any) -> None:
        if not came.done():
            came.set_result(results)

    def wait() -> None:
        results = call.wait()
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, results)

    threading.Thread(target=wait, daemon=True, name=f"wait for {who}").start()
    results = await came
    if not call.done():
        raise WorkerFailedError(f"A process of {who} failed{failure_of(call)}; its error is printed above.")
    return results


def answer_of(call: Any, limit_s: float) -> Any:
    """The results of a call of a worker group, or None if it fails or takes longer than `limit_s`."""
    results: list[Any] = []
    waiting = threading.Thread(target=lambda: results.append(call.wait()), daemon=True, name="wait for an answer")
    waiting.start()
    waiting.join(limit_s)
    return results[0] if results and call.done() else None


def failure_of(call: Any) -> str:
    """Which ranks of a call of a worker group failed, and why, as far as Ray knows."""
    remote_results = getattr(call, "_remote_results", None)
    if remote_results is None:
        return ""
    import ray

    reasons = []
    for rank, result in enumerate(remote_results):
        try:
            ray.get(result, timeout=0)
        except ray.exceptions.GetTimeoutError:
            continue  # it still works
        except Exception as error:  # whatever it is, it is reported
            reasons.append(f"rank {rank}: {innermost(error)}")
    return f" ({'; '.join(reasons)})" if reasons else ""


def innermost(error: BaseException) -> str:
    """The first line of what a task group or Ray has wrapped."""
    wrapped = getattr(error, "cause", None)
    if isinstance(wrapped, BaseException):
        return innermost(wrapped)
    if isinstance(error, BaseExceptionGroup):
        return innermost(error.exceptions[0])
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


class WorkersComponent:
    """Worker processes whose work is one long call.

    Args:
        who: their name.
        prepare: begins their start, None for nothing to do.
        work: begins the call.
        stop: asks them to cut it off, so that it returns.
        ends_alone: the call returns when the run needs no more of it; else `drain` stops it.
    """

    def __init__(self, who: str, prepare: Call | None, work: Call, stop: Call, *, ends_alone: bool = False) -> None:
        self._who, self._prepare, self._work, self._stop = who, prepare, work, stop
        self._ends_alone = ends_alone

    async def start(self) -> None:
        if self._prepare is not None:
            await finished(self._prepare(), self._who)

    async def run(self) -> None:
        await finished(self._work(), self._who)

    async def drain(self, mode: DrainMode) -> None:
        if mode == "cut" or not self._ends_alone:
            await finished(self._stop(), self._who)

    async def kill(self) -> None:
        """RLinf's processes end with the run's cluster."""


class DriverComponent:
    """Something that runs in the driver.

    Args:
        start: what has to be done first.
        work: until it returns or is drained.
        ends_alone: `drain` with ``finish`` lets it go on to its end.
    """

    def __init__(
        self,
        work: Callable[[], Awaitable[None]],
        start: Callable[[], Awaitable[None]] | None = None,
        *,
        ends_alone: bool = False,
    ) -> None:
        self._work, self._start, self._ends_alone = work, start, ends_alone
        self._cut = asyncio.Event()

    async def start(self) -> None:
        if self._start is not None:
            await self._start()

    async def run(self) -> None:
        working = asyncio.ensure_future(self._work())
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait({working, cut}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            for task in (working, cut):
                task.cancel()

    async def drain(self, mode: DrainMode) -> None:
        if mode == "cut" or not self._ends_alone:
            self._cut.set()

    async def kill(self) -> None:
        self._cut.set()


Log = Callable[[Mapping[str, float], int], None]
Merge = Callable[[list[Mapping[str, Any]]], Mapping[str, Any]]


class Evaluations:
    """One at a time: what is asked for while one runs follows it, with the policy of then.

    Args:
        begin: begins an evaluation of all environment workers.
        merge: RLinf's metrics of all environment workers from those of each.
        log: gets them and the step that asked for them.
        every: training steps between evaluations; none below 1.
        last: the run's last step, after which there is one too.
    """

    def __init__(self, begin: Callable[[], Any], merge: Merge, log: Log, every: int, last: int) -> None:
        self._begin, self._merge, self._log = begin, merge, log
        self._every, self._last = every, last
        self._turn = asyncio.Lock()
        self._asked: list[asyncio.Task[None]] = []

    def ask(self, step: int) -> None:
        """Training step `step` is done: evaluate if it is time to.

        Raises:
            WorkerFailedError: an earlier evaluation failed.
        """
        for task in [task for task in self._asked if task.done()]:
            self._asked.remove(task)
            task.result()
        done = step + 1
        if self._every > 0 and (done == self._last or done % self._every == 0):
            self._asked.append(asyncio.create_task(self._evaluate(step), name=f"evaluation of step {step}"))

    async def finish(self) -> None:
        """Wait for those that are left.

        Raises:
            WorkerFailedError: one failed.
        """
        while self._asked:
            await self._asked.pop(0)

    def cancel(self) -> None:
        """Wait for none of them."""
        for task in self._asked:
            task.cancel()

    async def _evaluate(self, step: int) -> None:
        async with self._turn:
            results = await finished(self._begin(), "env workers")
        merged = self._merge([result["metrics"] for result in results])
        metrics = {name: float(value) for name, value in merged.items()}
        versions = [version for result in results for version in result["versions"]]
        acted = {"first_version": float(min(versions)), "last_version": float(max(versions))}
        self._log({f"eval/{name}": value for name, value in {**metrics, **acted}.items()}, step)
