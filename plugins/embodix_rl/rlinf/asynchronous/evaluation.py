# SPDX-License-Identifier: Apache-2.0
"""Evaluations that run beside training, as the driver asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from embodix_rl.rlinf.asynchronous.components import finished

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
