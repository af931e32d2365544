# SPDX-License-Identifier: Apache-2.0
"""Versioned weights: a version arrives in parts beside the one in use, and takes its place as a whole.

The receiver holds two buffers. Parts of a version fill the back one while the front one serves; when the last part is
there the buffers may be exchanged, between two batches, so an action is computed with exactly one version. A version
that is interrupted, by a newer one or by the end of the sender, is never visible.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from embodix_rl.scheduling.channels import Send
from embodix_rl.scheduling.waiting import waiting


@dataclass(frozen=True)
class VersionBegin:
    """Announces a version: how many parts it has, and a hash of the names of its weights in their order."""

    version: int
    num_parts: int
    names: str


@dataclass(frozen=True)
class Part:
    """One part of a version; `index` counts from 0."""

    version: int
    index: int
    payload: Any


WeightMessage = VersionBegin | Part


def hash_of_names(names: Sequence[str]) -> str:
    """Of the weights' names in the order in which they are sent: both sides must agree on it."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


class Buffer(Protocol):
    """One set of weights that parts are written to."""

    def write(self, part: Part) -> None:
        """Put a part where it belongs."""
        ...


class WeightReceiver[B: Buffer]:
    """The rollout worker's two buffers.

    Args:
        front, back: buffers; `front` holds `version` already.
        names: of the weights, as this side knows them.
        version: of what `front` holds.
        worker: name, for messages.
        on_adopt: told of each version that comes into use, the staleness gate's `adopt` for example.
        deadline_s: the longest wait for the end of a use of the front buffer, and for a version.
    """

    def __init__(
        self,
        front: B,
        back: B,
        names: Sequence[str],
        *,
        version: int = 0,
        worker: str = "rollout",
        on_adopt: Callable[[str, int], Awaitable[None]] | None = None,
        deadline_s: float = 600.0,
    ) -> None:
        self._front, self._back, self._names = front, back, hash_of_names(names)
        self.version, self.worker, self._on_adopt, self._deadline_s = version, worker, on_adopt, deadline_s
        self._announced: VersionBegin | None = None
        self._written: set[int] = set()
        self._num_users = 0
        self._changed = asyncio.Condition()
        self.num_interrupted = 0

    @property
    def ready_version(self) -> int | None:
        """The complete version in the back buffer, if it holds one."""
        announced = self._announced
        return announced.version if announced is not None and len(self._written) == announced.num_parts else None

    @asynccontextmanager
    async def use(self) -> AsyncIterator[tuple[int, B]]:
        """The version in use and its buffer, which stays as it is within the context. Adopts a complete one first."""
        async with self._changed:
            await self._exchange()
            self._num_users += 1
        try:
            yield self.version, self._front
        finally:
            async with self._changed:
                self._num_users -= 1
                self._changed.notify_all()

    async def adopt(self) -> int:
        """Bring a complete version into use now, after the running uses; returns the version in use.

        Raises:
            WaitTimeout: a use lasted longer than the deadline.
        """
        async with self._changed:
            if self.ready_version is not None and self._num_users:
                async with waiting("weight exchange", self.worker, "the end of an inference", self._deadline_s):
                    await self._changed.wait_for(lambda: self.ready_version is None or not self._num_users)
            await self._exchange()
            return self.version

    async def accept(self, message: WeightMessage) -> None:
        """Take one message of the sender. A complete version comes into use before the next one may overwrite it.

        Raises:
            ValueError: another model's weights, a part twice, or an index out of range.
            WaitTimeout: a use of the front buffer lasted longer than the deadline.
        """
        if isinstance(message, VersionBegin):
            await self.adopt()
        async with self._changed:
            if isinstance(message, VersionBegin):
                self._announce(message)
            elif self._announced is not None and message.version == self._announced.version:
                self._write(message)
            self._changed.notify_all()

    async def wait_for_version(self, version: int) -> None:
        """Wait until `version` or a newer one is complete or in use.

        Raises:
            WaitTimeout: it did not come within the deadline; says how much of it is there.
        """
        async with self._changed:
            what = f"version {version} (version {self.version} is in use, {self._progress()})"
            async with waiting(self.worker, "trainer", what, self._deadline_s):
                await self._changed.wait_for(lambda: max(self.version, self.ready_version or 0) >= version)

    async def _exchange(self) -> None:
        """With the lock held: the back buffer takes the front's place if it is complete and nobody uses the front."""
        ready = self.ready_version
        if ready is None or self._num_users:
            return
        self._front, self._back = self._back, self._front
        self.version, self._announced, self._written = ready, None, set()
        self._changed.notify_all()
        if self._on_adopt is not None:
            await self._on_adopt(self.worker, ready)

    def _announce(self, begin: VersionBegin) -> None:
        newest = self.version if self._announced is None else self._announced.version
        if begin.names != self._names:
            raise ValueError(
                f"The weights of version {begin.version} are not {self.worker}'s: their names hash to {begin.names}, "
                f"here to {self._names}. Trainer and rollout must build the same model and send it in the same order."
            )
        if begin.version <= newest:
            raise ValueError(f"Versions only grow: {begin.version} was announced after {newest}.")
        if begin.num_parts < 1:
            raise ValueError(f"A version has at least one part, version {begin.version} has {begin.num_parts}.")
        self.num_interrupted += self._announced is not None and self.ready_version is None
        self._announced, self._written = begin, set()

    def _write(self, part: Part) -> None:
        announced = self._announced
        assert announced is not None
        if not 0 <= part.index < announced.num_parts or part.index in self._written:
            raise ValueError(
                f"Part {part.index} of version {part.version} came twice or is none of its {announced.num_parts} parts."
            )
        self._back.write(part)
        self._written.add(part.index)

    def _progress(self) -> str:
        announced = self._announced
        if announced is None:
            return "none is on its way"
        return f"{len(self._written)} of {announced.num_parts} parts of version {announced.version} are here"


class WeightSender:
    """The trainer's side: sends the newest version part by part, beside training.

    A version is sent to its end; of those that were offered meanwhile only the newest follows, the others are skipped.

    Args:
        channels: one to each receiver.
        names: of the weights, in the order of sending.
    """

    def __init__(self, channels: Sequence[Send[WeightMessage]], names: Sequence[str]) -> None:
        self._channels, self._names = list(channels), hash_of_names(names)
        self._offered: tuple[int, Sequence[Any]] | None = None
        self._wake = asyncio.Event()
        self._closed = False
        self.num_skipped = 0

    def offer(self, version: int, parts: Sequence[Any]) -> None:
        """Have `version` sent; `parts` must not change any more, so they are a copy of what training goes on with."""
        self.num_skipped += self._offered is not None
        self._offered = (version, parts)
        self._wake.set()

    def close(self) -> None:
        """End `run` when what was offered has been sent."""
        self._closed = True
        self._wake.set()

    async def run(self) -> None:
        """Send what is offered until `close`."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._offered is not None:
                (version, parts), self._offered = self._offered, None
                await self._send(version, parts)
            if self._closed:
                return

    async def _send(self, version: int, parts: Sequence[Any]) -> None:
        begin = VersionBegin(version, len(parts), self._names)
        messages: list[WeightMessage] = [begin]
        messages += [Part(version, index, payload) for index, payload in enumerate(parts)]
        for message in messages:
            for channel in self._channels:
                await channel.send(message)
