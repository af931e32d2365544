# SPDX-License-Identifier: Apache-2.0
"""What a setting of the batcher would have served: measured clients, replayed against measured inference times.

The clients of a rollout worker are a closed loop: a shard asks, is answered, is stepped by its source, and asks again.
Sources step their shards one at a time in the order of the answers.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from embodix_rl.scheduling.batcher import BatchLimits


@dataclass(frozen=True)
class ClientTrace:
    """How long a client's last steps took, and whose process takes them."""

    source: str
    worked_s: Sequence[float]


@dataclass(frozen=True)
class Replayed:
    """What a replay served.

    Attributes:
        requests_per_s: after the first quarter.
        mean_wait_s: of a request, from its arrival to its batch's leaving.
    """

    requests_per_s: float
    mean_wait_s: float


def replay(
    clients: Mapping[str, ClientTrace], inference_s: Callable[[int], float], limits: BatchLimits, num_requests: int
) -> Replayed:
    """Serve `num_requests` requests by the rule of `DynamicBatcher`, on a clock of its own.

    Steady steps keep the phase that they begin with, and a setting may serve much when all ask at once and little
    when they do not. So both are replayed, and the one that serves less is what the setting is good for.

    Args:
        clients: their steps are taken in turn from their traces.
        inference_s: of a number of requests.
        limits: counted in requests.
        num_requests: how many, at least 4.
    """
    together = dict.fromkeys(clients, 0.0)
    round_s = sum(trace.worked_s[0] for trace in clients.values()) / len(clients) + inference_s(1)
    spread = {client: round_s * place / len(clients) for place, client in enumerate(clients)}
    return min(
        (_Replay(clients, inference_s, limits, begin).run(num_requests) for begin in (together, spread)),
        key=lambda replayed: replayed.requests_per_s,
    )


class _Replay:
    def __init__(
        self,
        clients: Mapping[str, ClientTrace],
        inference_s: Callable[[int], float],
        limits: BatchLimits,
        begin: Mapping[str, float],
    ) -> None:
        self._clients, self._inference_s, self._limits = clients, inference_s, limits
        self._thinking = sorted((moment, client) for client, moment in begin.items())
        self._waiting: deque[tuple[float, str]] = deque()
        self._source_free: dict[str, float] = {}
        self._num_steps = dict.fromkeys(clients, 0)
        self._now = 0.0

    def run(self, num_requests: int) -> Replayed:
        num_warm, warm_at = num_requests // 4, 0.0
        served, waits = 0, 0.0
        while served < num_requests:
            batch = self._next_batch()
            if served >= num_warm:
                waits += sum(self._now - arrived for arrived, _ in batch)
            was_cold = served < num_warm
            served += len(batch)
            self._now += self._inference_s(len(batch))
            for _, client in batch:
                self._answer(client)
            if was_cold and served >= num_warm:
                num_warm, warm_at = served, self._now
        counted = served - num_warm
        if not counted:
            return Replayed(0.0, 0.0)
        took = self._now - warm_at
        return Replayed(counted / took if took else math.inf, waits / counted)

    def _next_batch(self) -> list[tuple[float, str]]:
        limits, waiting = self._limits, self._waiting
        self._arrive_until(self._now)
        if not waiting:
            self._now = self._thinking[0][0]
            self._arrive_until(self._now)
        deadline = waiting[0][0] + limits.max_wait_s
        while len(waiting) < limits.max_size and self._thinking and self._thinking[0][0] <= deadline:
            waiting.append(heapq.heappop(self._thinking))
            self._now = max(self._now, waiting[-1][0])
        if len(waiting) < limits.max_size and self._thinking:
            self._now = max(self._now, deadline)
        self._arrive_until(self._now)
        return [waiting.popleft() for _ in range(min(limits.max_size, len(waiting)))]

    def _arrive_until(self, moment: float) -> None:
        while self._thinking and self._thinking[0][0] <= moment:
            self._waiting.append(heapq.heappop(self._thinking))

    def _answer(self, client: str) -> None:
        trace = self._clients[client]
        worked = trace.worked_s[self._num_steps[client] % len(trace.worked_s)]
        self._num_steps[client] += 1
        done = max(self._now, self._source_free.get(trace.source, 0.0)) + worked
        self._source_free[trace.source] = done
        heapq.heappush(self._thinking, (done, client))
