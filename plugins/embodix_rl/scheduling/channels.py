# SPDX-License-Identifier: Apache-2.0
"""What the scheduling core needs of a channel, and a channel within one process.

A shell around a host's channel is two methods: `receive` awaits the host's asynchronous get, `send` its put.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from embodix_rl.scheduling.waiting import waiting


class ChannelClosed(Exception):  # noqa: N818  (an end, not an error)
    """Nothing will come any more, and everything that was sent has been received."""


class Receive[T](Protocol):
    """The receiving end of a channel."""

    async def receive(self) -> T:
        """The next item, in the order of sending.

        Raises:
            ChannelClosed: there will be none.
        """
        ...


class Send[T](Protocol):
    """The sending end of a channel."""

    async def send(self, item: T) -> None:
        """Hand over an item; waits where the channel is full.

        Raises:
            ChannelClosed: nobody will receive it.
        """
        ...


class Mailbox[T]:
    """A first-in, first-out channel within one event loop.

    A cancelled `receive` loses nothing. `close` lets receivers have what is there and then raises `ChannelClosed`.

    Args:
        name: who receives, for the messages of time-outs.
        depth: items that it holds at most; `send` waits for room.
        deadline_s: the longest that `send` waits for room.
    """

    def __init__(self, name: str, depth: int | None = None, deadline_s: float = 600.0) -> None:
        if depth is not None and depth < 1:
            raise ValueError(f"A channel's `depth` must be at least 1, got {depth}.")
        self.name, self._depth, self._deadline_s = name, depth, deadline_s
        self._items: deque[T] = deque()
        self._changed = asyncio.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    async def send(self, item: T) -> None:
        async with self._changed:
            if self._is_full():
                async with waiting("a sender", self.name, f"room for more than {self._depth} items", self._deadline_s):
                    await self._changed.wait_for(lambda: self._closed or not self._is_full())
            if self._closed:
                raise ChannelClosed(self.name)
            self._items.append(item)
            self._changed.notify_all()

    async def receive(self) -> T:
        async with self._changed:
            await self._changed.wait_for(lambda: self._items or self._closed)
            if not self._items:
                raise ChannelClosed(self.name)
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    async def close(self) -> None:
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _is_full(self) -> bool:
        return self._depth is not None and len(self._items) >= self._depth
