# SPDX-License-Identifier: Apache-2.0
"""The staleness gate: generation is paced so that whatever is generated can be trained in time.

A global batch has the number of the policy version that its training begins with. A sample whose generation begins at
version v may be trained in batches up to v + `max_staleness`: that is its deadline. The gate admits a sample only while
the batches up to its deadline have room for it and for all samples that are under way, so by induction every set of
samples under way fits, earliest deadline first. Samples may finish and be taken in another order as long as the room
that earlier deadlines need is kept. Nothing has to be thrown away, whatever the speeds.

Two numbers, two meanings: `max_staleness` bounds how off-policy a sample may be, `queue_depth` how many samples may be
under way or finished and not yet taken, which is what memory holds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from embodix_rl.scheduling.waiting import waiting


@dataclass(frozen=True)
class GateSettings:
    """How generation is paced.

    Attributes:
        batch_size: samples of one global batch.
        max_staleness: versions between the generation of a sample and the batch that trains it, at most.
        queue_depth: samples under way or finished and not yet taken, at most; None for as many as `max_staleness`
            allows.
        num_batches: global batches of the run; None for no end.
        first_version: the policy version that the run begins with.

    Raises:
        ValueError: a value out of range.
    """

    batch_size: int
    max_staleness: int = 1
    queue_depth: int | None = None
    num_batches: int | None = None
    first_version: int = 0

    def __post_init__(self) -> None:
        leasts = {"batch_size": 1, "max_staleness": 0, "queue_depth": 1, "num_batches": 1, "first_version": 0}
        for name, least in leasts.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"`{name}` must be at least {least}, got {value}.")


@dataclass(frozen=True)
class Ticket:
    """The right to generate a sample, to be used once.

    Attributes:
        number: unique in a run.
        version: the oldest policy version that its actions can carry.
        deadline: the last global batch that may train it.
        who: generates it.
    """

    number: int
    version: int
    deadline: int
    who: str


@dataclass(frozen=True, eq=False)
class FinishedSample:
    """A generated sample.

    Attributes:
        ticket: that it was generated under.
        payload: whatever the trainer wants of it.
        valid: False for a trajectory cut off by a failure: it keeps its place in the batch, at zero weight.
    """

    ticket: Ticket
    payload: Any
    valid: bool = True


@dataclass
class GateCounts:
    """What has gone through a gate, in samples."""

    admitted: int = 0
    finished: int = 0
    masked: int = 0
    taken: int = 0
    staleness: Counter[int] = field(default_factory=Counter)

    @property
    def discarded(self) -> int:
        """Samples that were finished and can never be trained: 0 once a run has ended, since generation is paced."""
        return self.finished - self.taken


class StalenessGate:
    """Paces generation and hands what it generated to one trainer, each sample once.

    The trainer's side (`take`, `advance`) belongs to one process, the trainer's first rank, which tells the others what
    it took; so all ranks train on the same batch.

    Args:
        settings: the bounds.
        deadline_s: the longest that `admit` and `take` wait.
    """

    def __init__(self, settings: GateSettings, deadline_s: float = 3600.0) -> None:
        self.settings, self._deadline_s = settings, deadline_s
        self.counts = GateCounts()
        self.version = settings.first_version
        self._adopted: dict[str, int] = {}
        self._filling, self._room = settings.first_version, settings.batch_size
        self._under_way: dict[int, Ticket] = {}
        self._finished: list[FinishedSample] = []
        self._number = 0
        self.num_under_way = 0  # samples admitted and not yet taken
        self._queue: list[object] = []
        self._changed = asyncio.Condition()

    @property
    def filling(self) -> int:
        """The number of the batch that `take` fills."""
        return self._filling

    @property
    def is_over(self) -> bool:
        """Every batch of the run has been filled."""
        last = self._last_batch()
        return last is not None and self._filling > last

    @property
    def generating_version(self) -> int:
        """The oldest version that generation may still use."""
        return min(self._adopted.values(), default=self.version)

    async def adopt(self, worker: str, version: int) -> None:
        """A rollout worker generates with `version` from now on.

        Raises:
            ValueError: the version was not announced, or is older than the worker's last one.
        """
        before = self._adopted.get(worker, self.settings.first_version)
        if not before <= version <= self.version:
            raise ValueError(
                f"{worker} can adopt versions from its own, {before}, to the newest, {self.version}; got {version}."
            )
        async with self._changed:
            self._adopted[worker] = version
            self._changed.notify_all()

    async def advance(self, version: int) -> None:
        """The trainer has finished a global batch and offers `version`, the next one.

        Raises:
            ValueError: not the next version, or its batch is not full.
        """
        if version != self.version + 1 or version > self._filling:
            raise ValueError(
                f"After version {self.version} comes {self.version + 1}, when batch {self.version} is full; got "
                f"{version} while batch {self._filling} lacks {self._room} samples."
            )
        async with self._changed:
            self.version = version
            self._changed.notify_all()

    async def admit(self, who: str) -> Ticket | None:
        """The right to generate; waits until nothing of it would come too late. First come, first served.

        Returns:
            None when the run needs no more samples.

        Raises:
            WaitTimeout: the deadline passed.
        """
        place = object()
        async with self._changed:
            self._queue.append(place)
            try:
                async with waiting(who, "trainer", self._missing(), self._deadline_s):
                    await self._changed.wait_for(lambda: self.is_over or (self._queue[0] is place and self.may_admit()))
                return None if self.is_over else self._ticket(who)
            finally:
                self._queue.remove(place)
                self._changed.notify_all()

    def may_admit(self) -> bool:
        """Whether one more ticket fits."""
        depth, under_way = self.settings.queue_depth, self.num_under_way
        return (depth is None or under_way < depth) and under_way < self._room_until(self._deadline())

    async def finish(self, finished: FinishedSample) -> None:
        """Hand in what was generated under a ticket.

        Raises:
            ValueError: the ticket is not under way: unknown, or used before.
        """
        if self._under_way.pop(finished.ticket.number, None) != finished.ticket:
            raise ValueError(f"{finished.ticket} is not under way: it was handed in before, or never issued.")
        async with self._changed:
            self._finished.append(finished)
            self.counts.finished += 1
            self.counts.masked += not finished.valid
            self._changed.notify_all()

    async def take(self, who: str = "trainer") -> FinishedSample:
        """The next finished sample for the batch that is being filled, the earliest deadline first.

        Raises:
            WaitTimeout: the deadline passed; names who generates what is missing.
            ValueError: the run is over.
        """
        if self.is_over:
            raise ValueError(f"All {self.settings.num_batches} batches of the run have been filled.")
        async with self._changed:
            async with waiting(who, self._generators(), f"samples of batch {self._filling}", self._deadline_s):
                await self._changed.wait_for(lambda: self._takeable() is not None)
            taken = self._takeable()
            assert taken is not None
            self._finished.remove(taken)
            self._count(taken)
            self._changed.notify_all()
            return taken

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps between two batches; the finished samples' payloads are the caller's to write."""
        return {
            "version": self.version,
            "filling": self._filling,
            "room": self._room,
            "number": self._number,
            "finished": list(self._finished),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`; what was under way then is admitted again.

        Raises:
            ValueError: a finished sample whose deadline the settings of this run no longer allow.
        """
        late = [one.ticket for one in state["finished"] if one.ticket.deadline < state["filling"]]
        if late:
            raise ValueError(f"Batch {state['filling']} is past the deadline of {late[0]}.")
        self.version, self._filling, self._room = state["version"], state["filling"], state["room"]
        self._number, self._finished = state["number"], list(state["finished"])
        self.num_under_way = len(self._finished)

    def _ticket(self, who: str) -> Ticket:
        ticket = Ticket(self._number, self.generating_version, self._deadline(), who)
        self._number += 1
        self._under_way[ticket.number] = ticket
        self.num_under_way += 1
        self.counts.admitted += 1
        return ticket

    def _count(self, taken: FinishedSample) -> None:
        self.num_under_way -= 1
        self.counts.taken += 1
        self.counts.staleness[self._filling - taken.ticket.version] += 1
        self._room -= 1
        if not self._room:
            self._filling, self._room = self._filling + 1, self.settings.batch_size

    def _deadline(self) -> int:
        """Of a sample that begins now."""
        last, allowed = self._last_batch(), self.generating_version + self.settings.max_staleness
        return allowed if last is None else min(allowed, last)

    def _last_batch(self) -> int | None:
        settings = self.settings
        return None if settings.num_batches is None else settings.first_version + settings.num_batches - 1

    def _room_until(self, batch: int) -> int:
        """Samples that all batches from the one being filled to `batch` still lack."""
        return self._room + self.settings.batch_size * (batch - self._filling) if batch >= self._filling else 0

    def _takeable(self) -> FinishedSample | None:
        """The finished sample with the earliest deadline, if the batch has room for it beside what it must keep."""
        earliest = min(self._finished, key=lambda one: (one.ticket.deadline, one.ticket.number), default=None)
        if earliest is None or self.version < self._filling:  # the batch before is still being trained
            return None
        tickets = [*self._under_way.values(), *(finished.ticket for finished in self._finished)]
        for batch in range(self._filling, earliest.ticket.deadline):
            if sum(ticket.deadline <= batch for ticket in tickets) >= self._room_until(batch):
                return None
        return earliest

    def _missing(self) -> str:
        return (
            f"room for 1 samples of version {self.generating_version} "
            f"(batch {self._filling} is being filled, {self.num_under_way} samples are under way)"
        )

    def _generators(self) -> str:
        return ", ".join(sorted({ticket.who for ticket in self._under_way.values()})) or "anybody to begin generating"
