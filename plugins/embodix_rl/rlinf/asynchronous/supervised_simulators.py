# SPDX-License-Identifier: Apache-2.0
"""An environment worker's simulators as its shards use them: one call at a time, started again when they are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from embodix_rl.rlinf.asynchronous.exchange import SimulatorsLost
from embodix_rl.rlinf.simulator_process import RemoteSimulators, SimulatorLostError


class SupervisedSimulators:
    """Calls in one thread, so that messages pass meanwhile and what belongs to a thread (a rendering context) stays.

    Args:
        worker: their owner's name.
        remote: their process; None where they are in this one, and whatever they raise ends the run.
        begin_again: what has to be done in the thread after a restart.
    """

    def __init__(self, worker: str, remote: RemoteSimulators | None, begin_again: Callable[[], None]) -> None:
        self._worker, self._remote, self._begin_again = worker, remote, begin_again
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="simulators")
        self._calling = asyncio.Lock()
        self._is_stopped = False

    @property
    def life(self) -> int:
        """Which of their lives this is."""
        return 0 if self._remote is None else self._remote.life

    def do_now(self, work: Callable[..., Any], *args: Any) -> Any:
        """The result of `work` in the simulators' thread, where nothing else goes on."""
        return self._thread.submit(work, *args).result()

    async def do(
        self,
        work: Callable[..., Any],
        *args: Any,
        life: int | None = None,
        tell: Callable[[SimulatorsLost], Awaitable[None]],
    ) -> Any:
        """The result of `work`.

        Args:
            life: of the simulators, that the work goes on with; None for work that begins something.
            tell: hears of a restart before it is tried.

        Raises:
            SimulatorLostError: they were lost, now or since `life`; they run again.
        """
        async with self._calling:
            if life is not None and life != self.life:
                raise SimulatorLostError(f"{self._worker} has started its simulators again since.")
            try:
                return await self._in_thread(work, *args)
            except SimulatorLostError as lost:
                await self._restart(str(lost), tell)
                raise

    def stop(self) -> None:
        """End what they do."""
        self._is_stopped = True
        if self._remote is not None:
            self._remote.kill()

    async def _restart(self, reason: str, tell: Callable[[SimulatorsLost], Awaitable[None]]) -> None:
        while True:
            await tell(SimulatorsLost(self._worker, reason))
            try:
                return await self._in_thread(self._start_again)
            except SimulatorLostError as lost:
                reason = str(lost)

    def _start_again(self) -> None:
        if self._remote is None or self._is_stopped:
            return
        self._remote.restart()
        self._begin_again()

    async def _in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
