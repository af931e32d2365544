# SPDX-License-Identifier: Apache-2.0
"""Where simulators run: in this process, or in worker processes that may die and are replaced."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Protocol

from embodix.contracts import Simulators
from embodix.evaluation.episodes import Begin, Command, Ready, Reply, SlotSimulators
from embodix.simulation.process import SimulatorProcess

JOIN_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Lost:
    """The slot's simulator died with its worker, and with it the episode that was under way."""

    slot: int
    reason: str


class Workers(Protocol):
    """Executes the commands of slots, each slot's in order."""

    def send(self, commands: Sequence[Command]) -> None:
        """Hand commands over, at most one a slot that has no reply outstanding."""

    def receive(self, slots: Collection[int]) -> list[Reply | Lost]:
        """The replies that have come for some of these slots; waits for at least one."""

    def close(self) -> None:
        """Close the simulators."""


class InProcess:
    """Simulators in this process, executed when a command is sent."""

    def __init__(self, simulators: Simulators) -> None:
        self._simulators = SlotSimulators(simulators)
        self._replies: dict[int, Reply] = {}

    def send(self, commands: Sequence[Command]) -> None:
        """Execute the commands."""
        for command in commands:
            self._replies[command.slot] = self._simulators.execute(command)

    def receive(self, slots: Collection[int]) -> list[Reply | Lost]:
        """The replies of all these slots."""
        return [self._replies.pop(slot) for slot in slots]

    def close(self) -> None:
        """Close the simulators."""
        self._simulators.close()


@dataclass
class _Worker:
    """A worker process, the slots whose reply is outstanding, and those with an episode under way."""

    process: SimulatorProcess
    awaited: set[int] = field(default_factory=set)
    running: set[int] = field(default_factory=set)


class Processes:
    """Simulators in worker processes.

    A worker that dies, or does not answer in time, is replaced; its slots with an episode under way get a `Lost`
    as their reply.

    Args:
        simulators: sent to every worker.
        worker_of: the worker of each slot, 0 .. num_workers - 1.
        timeout_s: how long `receive` waits for an answer.
    """

    def __init__(self, simulators: Simulators, worker_of: Sequence[int], timeout_s: float) -> None:
        self._simulators, self._worker_of, self._timeout_s = simulators, worker_of, timeout_s
        self.started = [self._start() for _ in range(max(worker_of) + 1)]
        self._replies: dict[int, Reply | Lost] = {}
        self._lost: dict[int, str] = {}

    def send(self, commands: Sequence[Command]) -> None:
        """Send each worker its commands; an episode that is lost already is answered at once."""
        batches: dict[int, list[Command]] = {}
        for command in commands:
            if isinstance(command, Begin):
                self._lost.pop(command.slot, None)
            elif command.slot in self._lost:
                self._replies[command.slot] = Lost(command.slot, self._lost.pop(command.slot))
                continue
            batches.setdefault(self._worker_of[command.slot], []).append(command)
        for index, batch in batches.items():
            worker = self.started[index]
            slots = {command.slot for command in batch}
            worker.awaited |= slots
            worker.running |= slots
            try:
                worker.process.send(batch)
            except OSError:
                self._replace(index)

    def receive(self, slots: Collection[int]) -> list[Reply | Lost]:
        """The replies that have come for some of these slots; waits for at least one."""
        while not any(slot in self._replies for slot in slots):
            self._listen({self._worker_of[slot] for slot in slots})
        return [self._replies.pop(slot) for slot in slots if slot in self._replies]

    def close(self) -> None:
        """Let the workers close their simulators and end; one that does not is killed."""
        for worker in self.started:
            worker.process.hang_up()
        for worker in self.started:
            worker.process.end(JOIN_TIMEOUT_S)

    def _start(self) -> _Worker:
        return _Worker(SimulatorProcess(partial(SlotSimulators, self._simulators)))

    def _listen(self, indices: set[int]) -> None:
        processes: dict[Any, int] = {self.started[index].process: index for index in indices}
        ready = wait(list(processes), self._timeout_s)
        if not ready:
            for index in indices:
                self._replace(index, f"no answer came from its worker for {self._timeout_s:g} s")
        for process in ready:
            index = processes[process]
            worker = self.started[index]
            try:
                reply: Reply = worker.process.receive()
            except (EOFError, OSError):
                self._replace(index)
                continue
            worker.awaited.discard(reply.slot)
            if not isinstance(reply, Ready):
                worker.running.discard(reply.slot)
            self._replies[reply.slot] = reply

    def _replace(self, index: int, reason: str | None = None) -> None:
        """Put a fresh process in a worker's place and say which episodes are lost."""
        worker = self.started[index]
        worker.process.hang_up()
        if reason is not None:
            worker.process.kill()
        exit_code = worker.process.exit_code()
        reason = reason or f"its worker process died with exit code {exit_code}"
        logging.warning("A simulation worker is replaced: %s.", reason)
        self.started[index] = self._start()
        for slot in worker.running:
            if slot in worker.awaited:
                self._replies[slot] = Lost(slot, reason)
            else:
                self._lost[slot] = reason
