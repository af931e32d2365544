# SPDX-License-Identifier: Apache-2.0
"""Runs components on asyncio by the protocol: what a runner's driver does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from embodix_rl.scheduling.protocol import (
    Advanced,
    Command,
    Drain,
    DrainAsked,
    DrainMode,
    Ended,
    Event,
    Failed,
    Kill,
    Phase,
    RunProtocol,
    Start,
    Started,
)
from embodix_rl.scheduling.supervision import Heartbeats

LAST_WORDS_S = 30.0  # for kills that are still under way when the run has ended


class RunFailedError(RuntimeError):
    """A run ended because of a failure; the message says which, and where every component was."""


class Component(Protocol):
    """One component, in this process or somewhere else."""

    async def start(self, is_restart: bool) -> None:
        """Set up; the component runs when this returns. After a restart nothing of its last life may remain."""
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


Life = tuple[str, int]  # a component and how often it has begun or been ended


class Conductor:
    """Starts, watches, drains and restarts components until the run has ended.

    Args:
        protocol: of a run that has not begun.
        components: by the names in the protocol; `add` for those that need the conductor first.
        heartbeats: whoever reports to it and falls silent has failed; None where nobody reports.
    """

    def __init__(
        self, protocol: RunProtocol, components: Mapping[str, Component], heartbeats: Heartbeats | None = None
    ) -> None:
        self.protocol, self._components, self._heartbeats = protocol, dict(components), heartbeats
        self._events: asyncio.Queue[tuple[Life | None, Event]] = asyncio.Queue()
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._life_number = dict.fromkeys(self._components, 0)
        self._asking: set[asyncio.Task[None]] = set()

    def add(self, who: str, component: Component) -> None:
        """One more component, before `run`."""
        self._components[who], self._life_number[who] = component, 0

    def advanced(self, version: int) -> None:
        """The trainer offers `version`."""
        self._events.put_nowait((None, Advanced(version)))

    def ask_to_drain(self, reason: str) -> None:
        """End the run in good order."""
        self._events.put_nowait((None, DrainAsked(reason)))

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
        due = [moment for moment in (self.protocol.next_deadline(), self._next_silence()) if moment is not None]
        try:
            async with asyncio.timeout_at(min(due) if due else None):
                life, event = await self._events.get()
        except TimeoutError:
            self._execute(self.protocol.tick(self._now()))
            self._fail_the_silent()
            return
        if life is None or life[1] == self._life_number[life[0]]:
            self._execute(self.protocol.handle(event, self._now()))

    def _next_silence(self) -> float | None:
        return self._heartbeats.next_deadline() if self._heartbeats is not None else None

    def _fail_the_silent(self) -> None:
        if self._heartbeats is None:
            return
        now = self._now()
        for silence in self._heartbeats.overdue(now):
            self._heartbeats.forget(silence.who)
            self._execute([Kill(silence.who)])
            self._execute(self.protocol.handle(Failed(silence.who, silence.describe(now)), now))

    def _execute(self, commands: list[Command]) -> None:
        for command in commands:
            component = self._components[command.who]
            if isinstance(command, Start):
                self._begin_life(command.who, command.is_restart)
            elif isinstance(command, Drain):
                self._ask(command.who, component.drain(command.mode))
            else:
                self._end_life(command.who)
                self._ask(command.who, component.kill())

    def _begin_life(self, who: str, is_restart: bool) -> None:
        self._end_life(who)
        number = self._life_number[who]
        self._lives[who] = asyncio.create_task(self._live((who, number), is_restart), name=who)

    def _end_life(self, who: str) -> None:
        """Nothing that this life still says counts."""
        self._life_number[who] += 1
        if self._heartbeats is not None:
            self._heartbeats.forget(who)
        life = self._lives.pop(who, None)
        if life is not None:
            life.cancel()

    async def _live(self, life: Life, is_restart: bool) -> None:
        who, component = life[0], self._components[life[0]]
        try:
            if is_restart:
                await component.kill()
            await component.start(is_restart)
            self._events.put_nowait((life, Started(who)))
            await component.run()
            self._events.put_nowait((life, Ended(who)))
        except Exception as error:  # whatever it is, it is this component's failure and goes into the report
            self._events.put_nowait((life, Failed(who, _reason(error))))

    def _ask(self, who: str, asked: Coroutine[Any, Any, None]) -> None:
        """Drain or kill beside the conductor's own work; a component that can't even be asked has failed."""
        life = (who, self._life_number[who])

        async def ask() -> None:
            try:
                await asked
            except Exception as error:
                reason = f"it does not take its end: {_reason(error)}"
                self._events.put_nowait((life, Failed(who, reason)))

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
