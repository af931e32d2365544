# SPDX-License-Identifier: Apache-2.0
"""What paces generation and feeds training: the staleness gate, or a model of RLinf's store for comparison."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from embodix_rl.scheduling.staleness import FinishedSample, Ticket


@dataclass
class Trajectory:
    """One shard's trajectory.

    Attributes:
        frames: environment frames.
        oldest: the oldest version of its actions.
        num_uses: global batches that trained on it.
        sequence: order of arrival, for the store.
    """

    frames: int
    oldest: int
    num_uses: int = 0
    sequence: int = 0


class Pacing(Protocol):
    """What an environment worker asks before a trajectory and tells after it; see `StalenessGate`."""

    async def admit(self, who: str) -> Ticket | None: ...

    async def finish(self, finished: FinishedSample) -> None: ...


class StockStore:
    """RLinf 0.3's `PriorityStore` with its receiver, as they behave: nothing paces, and reading removes nothing.

    It keeps the `size` newest trajectories by their oldest version; what it drops without a use is counted. A
    trajectory older than `reuse_versions` is dropped when it arrives and when the trainer looks.
    """

    def __init__(self, size: int, reuse_versions: int, poll_s: float) -> None:
        self._size, self._reuse_versions, self._poll_s = size, reuse_versions, poll_s
        self._stored: list[Trajectory] = []
        self._num_tickets = 0
        self.version = 0
        self.discarded_frames = 0

    async def admit(self, who: str) -> Ticket | None:
        """Always."""
        self._num_tickets += 1
        return Ticket(self._num_tickets, self.version, self.version, who)

    async def finish(self, finished: FinishedSample) -> None:
        arrived: Trajectory = finished.payload
        arrived.sequence = finished.ticket.number
        self._stored.append(arrived)
        self._stored.sort(key=lambda one: (one.oldest, one.sequence))
        self._drop_old()
        if len(self._stored) > self._size:
            self._drop(self._stored[:1])

    async def batch(self) -> Sequence[Trajectory]:
        """The newest trajectories, used or not, when the store is full; it looks every `poll_s`."""
        while True:
            self._drop_old()
            if len(self._stored) >= self._size:
                return list(self._stored[-self._size :])
            await asyncio.sleep(self._poll_s)

    def _drop_old(self) -> None:
        self._drop([one for one in self._stored if one.oldest < self.version - self._reuse_versions])

    def _drop(self, dropped: Sequence[Trajectory]) -> None:
        self.discarded_frames += sum(one.frames for one in dropped if not one.num_uses)
        self._stored = [one for one in self._stored if one not in dropped]
