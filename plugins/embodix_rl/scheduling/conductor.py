# SPDX-License-Identifier: Apache-2.0
"""Runs components on asyncio by the protocol: what a runner's driver does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from embodix_rl.scheduling.protocol import (
    Command,
    ComponentEnded,
    ComponentFailed,
    ComponentStarted,
    DrainCommand,
    DrainMode,
    Phase,
    RunEvent,
    RunProtocol,
    StartCommand,
    VersionAdvanced,
)

LAST_WORDS_S = 30.0  # for kills that are still under way when the run has ended


class RunFailedError(RuntimeError):
    """A run ended because of a failure; the message says which, and where every component was."""


class Component(Protocol):
    """One component, in this process or somewhere else."""

    async def start(self) -> None:
        """Set up; the component runs when this returns."""
        ...

    async def run(self) -> None:
        """Work until the end, by itself or after `drain`. What it raises is its failure."""
        ...

    async def drain(self, mode: DrainMode) -> None:
        """Have `run` return: ``finish`` what was begun, or ``cut`` it off. May come before `start` has returned."""
        ...

    async def kill(self) -> None:
        """End whatever still runs of it, without its help; nothing to end is no error."""
        ...


class Conductor:
    """Starts, watches and drains components until the run has ended.

    Args:
        protocol: of a run that has not begun.
        components: by the names in the protocol; `add` for those that need the conductor first.
    """

    def __init__(self, protocol: RunProtocol, components: Mapping[str, Component]) -> None:
        self.protocol, self._components = protocol, dict(components)
        self._events: asyncio.Queue[RunEvent] = asyncio.Queue()
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._asking: set[asyncio.Task[None]] = set()

    def add(self, who: str, component: Component) -> None:
        """One more component, before `run`."""
        self._components[who] = component

    def advanced(self, version: int) -> None:
        """The trainer offers `version`."""
        self._events.put_nowait(VersionAdvanced(version))

    async def run(self) -> None:
        """The whole run.

        Raises:
            RunFailedError: a component failed for good; all others were drained first.
        """
        try:
            self._execute(self.protocol.begin(self._now()))
            while self.protocol.phase is not Phase.ENDED:
                await self._next_event()
        finally:
            await self._end_all()
        if self.protocol.has_failed:
            raise RunFailedError(self.protocol.describe())

    async def _next_event(self) -> None:
        """Wait for news or for a deadline, and do what the protocol says."""
        try:
            async with asyncio.timeout_at(self.protocol.next_deadline()):
                event = await self._events.get()
        except TimeoutError:
            self._execute(self.protocol.tick(self._now()))
            return
        self._execute(self.protocol.handle(event, self._now()))

    def _execute(self, commands: list[Command]) -> None:
        for command in commands:
            who, component = command.who, self._components[command.who]
            if isinstance(command, StartCommand):
                self._lives[who] = asyncio.create_task(self._live(who, component), name=who)
            elif isinstance(command, DrainCommand):
                self._ask(who, component.drain(command.mode))
            else:
                self._lives.pop(who).cancel()
                self._ask(who, component.kill())

    async def _live(self, who: str, component: Component) -> None:
        try:
            await component.start()
            self._events.put_nowait(ComponentStarted(who))
            await component.run()
            self._events.put_nowait(ComponentEnded(who))
        except Exception as error:  # whatever it is, it is this component's failure and goes into the report
            self._events.put_nowait(ComponentFailed(who, _reason(error)))

    def _ask(self, who: str, asked: Coroutine[Any, Any, None]) -> None:
        """Drain or kill beside the conductor's own work; a component that can't even be asked has failed."""

        async def ask() -> None:
            try:
                await asked
            except Exception as error:
                self._events.put_nowait(ComponentFailed(who, f"it does not take its end: {_reason(error)}"))

        task = asyncio.create_task(ask(), name=f"end {who}")
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _end_all(self) -> None:
        if self._asking:
            await asyncio.wait(self._asking, timeout=LAST_WORDS_S)
        for task in [*self._lives.values(), *self._asking]:
            task.cancel()
        await asyncio.gather(*self._lives.values(), *self._asking, return_exceptions=True)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _reason(error: Exception) -> str:
    """What failed, without the groups that tasks put around it."""
    if isinstance(error, ExceptionGroup):
        return "; ".join(_reason(one) for one in error.exceptions)
    return f"{type(error).__name__}: {error}"
