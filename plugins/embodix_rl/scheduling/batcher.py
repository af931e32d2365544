# SPDX-License-Identifier: Apache-2.0
"""Dynamic batching: a batch leaves when it is full or its first request has waited long enough.

The clock of a batch starts at the arrival of its first request, also where that happens while the server still computes
the batch before it. A receive that has been posted is never given up: what it brings joins the next batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from embodix_rl.scheduling.channels import ChannelClosed, Receive
from embodix_rl.scheduling.waiting import Wait, WaitTimeout, listed

Reason = Literal["full", "waited", "closed"]


@dataclass(frozen=True)
class InferenceRequest[P]:
    """One shard of observations that waits for its actions.

    Attributes:
        payload: whatever the server computes on.
        size: samples in it.
        client: the shard, the same name in each of its requests.
        source: the process that steps the shard; shards of one source are stepped one at a time.
        sent_at: when it was sent, on the server's clock; None where sender and server share no clock, which then
            counts from its receipt.
        worked_s: how long the source stepped this shard; None where it does not say.
    """

    payload: P
    size: int = 1
    client: str = ""
    source: str = ""
    sent_at: float | None = None
    worked_s: float | None = None


@dataclass(frozen=True)
class BatchLimits:
    """When a batch leaves.

    Attributes:
        max_size: as soon as it holds so many requests (B_max). It never holds more.
        max_wait_s: when its first request has waited so long (T_max). It takes along what is there, so with 0 a free
            server takes whatever waits.
    """

    max_size: int
    max_wait_s: float

    def __post_init__(self) -> None:
        if self.max_size < 1:
            raise ValueError(f"`max_size` must be at least 1, got {self.max_size}.")
        if not self.max_wait_s >= 0:
            raise ValueError(f"`max_wait_s` must be 0 or more, got {self.max_wait_s}.")


@dataclass(frozen=True)
class Batch[P]:
    """Requests that are computed together.

    Attributes:
        requests: in the order of their arrival.
        arrived_at: when each of them arrived.
        left_at: when the batch left.
        reason: why then.
    """

    requests: tuple[InferenceRequest[P], ...]
    arrived_at: tuple[float, ...]
    left_at: float
    reason: Reason

    @property
    def num_samples(self) -> int:
        return sum(request.size for request in self.requests)

    @property
    def longest_wait_s(self) -> float:
        """How long its first request had waited."""
        return self.left_at - min(self.arrived_at)


class BatchPolicy(Protocol):
    """Chooses the limits of each batch."""

    def limits(self) -> BatchLimits:
        """Those of the next batch."""
        ...

    def observe(self, batch: Batch[Any], inference_s: float) -> None:
        """A batch was computed in `inference_s` and is answered now."""
        ...


class FixedLimits:
    """The same limits for every batch."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits

    def limits(self) -> BatchLimits:
        return self._limits

    def observe(self, batch: Batch[Any], inference_s: float) -> None:
        """Nothing is learned."""


class DynamicBatcher[P]:
    """Forms batches of the requests of one channel.

    Fairness: requests leave in the order of their arrival. One that fits into the batch that follows the running one
    waits at most T_max or the rest of that inference, whichever is longer, so never more than T_max plus one inference;
    each further batch that the requests before it fill adds one inference.

    Args:
        requests: where they come from. At most one `receive` is posted, and none while a batch is computed that left
            by B_max alone: of several servers of one channel, a busy one keeps back one request at most.
        policy: B_max and T_max.
        name, clients: who waits for whom, for messages.
        deadline_s: the longest wait for the first request of a batch.
    """

    def __init__(
        self,
        requests: Receive[InferenceRequest[P]],
        policy: BatchPolicy,
        *,
        name: str = "rollout",
        clients: str = "env workers",
        deadline_s: float = 600.0,
    ) -> None:
        self._requests, self._policy = requests, policy
        self._name, self._clients, self._deadline_s = name, clients, deadline_s
        self._held: deque[tuple[InferenceRequest[P], float]] = deque()
        self._posted: asyncio.Task[tuple[InferenceRequest[P], float]] | None = None

    async def next_batch(self) -> Batch[P]:
        """The next batch. Cancelling the call loses no request: the next call goes on with what had arrived.

        Raises:
            ChannelClosed: all requests have left and none will come.
            WaitTimeout: no request came within the deadline.
        """
        limits = self._policy.limits()
        reason = await self._fill(limits)
        return self._leave(limits, reason)

    def observe(self, batch: Batch[P], inference_s: float) -> None:
        """Tell the policy how long a batch took, when its answers have been sent."""
        self._policy.observe(batch, inference_s)

    async def close(self) -> list[InferenceRequest[P]]:
        """Withdraw the posted receive; returns the requests that have arrived and will not be answered."""
        if self._posted is not None:
            self._posted.cancel()
            await asyncio.wait({self._posted})
            if not self._posted.cancelled() and self._posted.exception() is None:
                self._held.append(self._posted.result())
            self._posted = None
        left = [request for request, _ in self._held]
        self._held.clear()
        return left

    async def _fill(self, limits: BatchLimits) -> Reason:
        loop = asyncio.get_running_loop()
        while len(self._held) < limits.max_size:
            if self._held:
                rest_s = self._held[0][1] + limits.max_wait_s - loop.time()
                if not await self._arrives(max(rest_s, 0.0)):
                    return "closed" if self._is_closed() else "waited"
            else:
                await self._first_arrives()
        return "full"

    async def _first_arrives(self) -> None:
        loop = asyncio.get_running_loop()
        wait = Wait(self._name, self._clients, "a request", loop.time(), self._deadline_s)
        with listed(wait):
            if not await self._arrives(self._deadline_s):
                if self._is_closed():
                    raise ChannelClosed(f"{self._name} has answered every request.")
                raise WaitTimeout(wait, loop.time())

    async def _arrives(self, timeout_s: float) -> bool:
        """Wait for the posted receive, which survives the time-out."""
        if self._posted is None:
            self._posted = asyncio.create_task(self._receive(), name=f"receive of {self._name}")
        if not self._posted.done():
            await asyncio.wait({self._posted}, timeout=None if timeout_s == float("inf") else timeout_s)
        if not self._posted.done() or self._is_closed():
            return False
        posted, self._posted = self._posted, None
        self._held.append(posted.result())
        return True

    async def _receive(self) -> tuple[InferenceRequest[P], float]:
        request = await self._requests.receive()
        return request, asyncio.get_running_loop().time() if request.sent_at is None else request.sent_at

    def _is_closed(self) -> bool:
        posted = self._posted
        return posted is not None and posted.done() and isinstance(posted.exception(), ChannelClosed)

    def _leave(self, limits: BatchLimits, reason: Reason) -> Batch[P]:
        taken = [self._held.popleft() for _ in range(min(len(self._held), limits.max_size))]
        requests, arrivals = zip(*taken, strict=True)
        return Batch(requests, arrivals, asyncio.get_running_loop().time(), reason)
