# SPDX-License-Identifier: Apache-2.0
"""B_max and T_max chosen online.

The rule. Requests per second are what a rollout worker can add to a run, and in a closed loop they are a function of
four things: the steps of the clients, which of them share a process, the inference time t(b) of b requests, and the
setting (B, T). With equal steps s in processes of their own and a time of t(b) = alpha + beta * b, n clients served in
groups of b repeat every

    P(b) = max(n / b * t(b), s + t(b) + gather(b))

seconds: either the server is busy throughout (a larger b shares alpha among more) or every client waits for its group
(a smaller b waits less). gather(b), the wait for the last of a group, depends on how steps vary and on the whole
history of the queue, and no closed form of it holds for stragglers, unequal processes or several shards a process. So
P is not approximated but computed: the measured steps are replayed through the batcher's rule (`replay`) with the
measured t, for every candidate setting, and the one that serves most is chosen. The arrival rate enters as what causes
it, the clients' steps, which do not depend on the setting; the rate itself does.

What a setting really served is known better than what a replay says: where steps are steady, clients and server can
fall into a rhythm that serves less. So a replayed rate is scaled by the share of it that the setting last served.

Candidates are B in 1, 2, 3, 4, 6, 8, 12, ... up to the clients seen, with T of 0 and 1/4, 1 and 4 times t(1), at most
`longest_wait_s`. A larger B is only worth its wait if it serves more: within
`tolerance` of the best, the setting in use stays, or else the one with the shortest mean wait wins. So with steps that
do not drift the choice settles, and it is bounded by construction. Replays are spaced out twofold each time that the
choice stays, up to 64 rounds of all clients, and return to every 8 rounds when it changes.

Until batches of two sizes have been measured twice, sizes are capped to half the clients and to one client in turn, so
that t is known at three points.

A replay serves measured clients against measured inference times. The clients of a rollout worker are a closed loop: a
shard asks, is answered, is stepped by its source, and asks again. Sources step their shards one at a time in the order
of the answers.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from embodix_rl.scheduling.batcher import Batch, BatchLimits
from embodix_rl.scheduling.waiting import Clock

MEMORY = 128  # batches; older ones are forgotten, so a machine that slows down is noticed


class InferenceTime:
    """Seconds of inference as a function of the batch size.

    Sizes measured at least twice give their mean. Others lie on ``alpha + beta * size``, the least-squares line through
    the measurements with neither coefficient negative: a negative slope becomes a constant, a negative intercept a line
    through the origin.
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self._measured: deque[tuple[int, float]] = deque(maxlen=memory)
        self._means: dict[int, float] = {}
        self._line = (0.0, 0.0)
        self._stale = False

    def observe(self, size: int, seconds: float) -> None:
        self._measured.append((size, seconds))
        self._stale = True

    @property
    def sizes(self) -> set[int]:
        """The sizes that were measured at least twice."""
        self._refresh()
        return set(self._means)

    def __call__(self, size: int) -> float:
        if not self._measured:
            raise ValueError("No inference was measured yet.")
        self._refresh()
        alpha, beta = self._line
        return self._means.get(size, alpha + beta * size)

    def _refresh(self) -> None:
        if not self._stale:
            return
        by_size: dict[int, list[float]] = {}
        for size, seconds in self._measured:
            by_size.setdefault(size, []).append(seconds)
        self._means = {size: fmean(values) for size, values in by_size.items() if len(values) >= 2}
        self._line = _line(list(self._measured))
        self._stale = False


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and slope, neither negative."""
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    beta = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    if beta < 0:
        return mean_y, 0.0
    alpha = mean_y - beta * mean_x
    if alpha >= 0:
        return alpha, beta
    return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)


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


STEPS_REMEMBERED = 16
ROUNDS_BETWEEN_CHOICES = (8, 64)  # at first, at most


class AdaptiveLimits:
    """Limits that follow the measured clients and inference times, counted in requests.

    Args:
        capacity: requests in the largest batch, for its memory.
        longest_wait_s: T_max is never larger.
        tolerance: the share of requests per second that a shorter wait or an unchanged setting may cost.
        clock: the running event loop unless given.

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self, capacity: int, *, longest_wait_s: float = 1.0, tolerance: float = 0.01, clock: Clock | None = None
    ) -> None:
        if capacity < 1 or longest_wait_s < 0 or not 0 <= tolerance < 1:
            raise ValueError(
                "`capacity` must be at least 1, `longest_wait_s` 0 or more and `tolerance` in [0, 1); got "
                f"{capacity}, {longest_wait_s} and {tolerance}."
            )
        self._capacity, self._longest_wait_s, self._tolerance = capacity, longest_wait_s, tolerance
        self._clock = clock
        self._inference = InferenceTime()
        self._steps: dict[str, deque[float]] = {}
        self._source_of: dict[str, str] = {}
        self._answered_at: dict[str, float] = {}
        self._chosen = BatchLimits(capacity, 0.0)
        self._explore: list[int] = []
        self._num_explored = 0
        self._rounds, self._num_until_choice = ROUNDS_BETWEEN_CHOICES[0], 0
        self._kept: dict[BatchLimits, float] = {}  # share of its replayed rate that a setting served
        self._num_served, self._chosen_at = 0, 0.0
        self.num_choices = 0

    def limits(self) -> BatchLimits:
        if self._explore:
            return BatchLimits(self._explore[0], self._longest_wait_s)
        return self._chosen

    def observe(self, batch: Batch[Any], inference_s: float) -> None:
        """Learn from an answered batch, and choose again when it is time.

        Raises:
            ValueError: a request without the name of its client.
        """
        if not all(request.client for request in batch.requests):
            raise ValueError("Adaptive limits follow each client: a request must name its `client`.")
        now = (self._clock or asyncio.get_running_loop()).time()
        size = len(batch.requests)
        self._num_served += size
        self._inference.observe(size, inference_s)
        self._learn_steps(batch, now)
        if self._explore and size >= self._explore[0]:
            self._explore.pop(0)
        self._num_until_choice -= size
        if self._num_until_choice <= 0 and self._has_seen_all():
            self.choose(now)

    def _learn_steps(self, batch: Batch[Any], now: float) -> None:
        for request, arrived in zip(batch.requests, batch.arrived_at, strict=True):
            client = request.client
            self._source_of[client] = request.source or client
            steps = self._steps.setdefault(client, deque(maxlen=STEPS_REMEMBERED))
            if request.worked_s is not None:
                steps.append(request.worked_s)
            elif client in self._answered_at:
                steps.append(max(arrived - self._answered_at[client], 0.0))
            self._answered_at[client] = now

    def _has_seen_all(self) -> bool:
        """Every client has come back, and two sizes are known or being explored."""
        if not all(self._steps.values()) or self._explore:
            return False
        num_clients = len(self._steps)
        if len(self._inference.sizes) < 2 and num_clients > 1 and self._num_explored < 3:
            self._num_explored += 1
            self._explore = [size for size in ((num_clients + 1) // 2, 1) for _ in range(2) if size <= self._capacity]
            return False
        return True

    def choose(self, now: float) -> None:
        """Take the limits that would have served most of what was seen."""
        self._forget_the_gone()
        num_clients = len(self._steps)
        replayed = {limits: self._replay(limits) for limits in self._candidates(num_clients)}
        if self.num_choices and now > self._chosen_at:
            really = self._num_served / (now - self._chosen_at)
            self._kept[self._chosen] = min(1.0, really / replayed[self._chosen].requests_per_s)
        rates = {limits: one.requests_per_s * self._kept.get(limits, 1.0) for limits, one in replayed.items()}
        enough = max(rates.values()) * (1 - self._tolerance)
        good = [limits for limits, rate in rates.items() if rate >= enough]
        changed = self._chosen not in good
        if changed or self.num_choices == 0:
            self._chosen = min(good, key=lambda limits: (replayed[limits].mean_wait_s, limits.max_size))
        first, most = ROUNDS_BETWEEN_CHOICES
        self._rounds = first if changed else min(2 * self._rounds, most)
        self._num_until_choice = self._rounds * num_clients
        self._num_served, self._chosen_at = 0, now
        self.num_choices += 1

    def _forget_the_gone(self) -> None:
        """Clients that were not answered since the last choice: nobody waits for their requests."""
        for client in [client for client, moment in self._answered_at.items() if moment < self._chosen_at]:
            del self._steps[client], self._answered_at[client], self._source_of[client]

    def _candidates(self, num_clients: int) -> list[BatchLimits]:
        most = min(num_clients, self._capacity)
        sizes = sorted({size for size in _sizes(most) if size <= most} | {most})
        waits = sorted({min(scale * self._inference(1), self._longest_wait_s) for scale in (0.0, 0.25, 1.0, 4.0)})
        settings = [BatchLimits(size, wait) for size in sizes for wait in (waits if size > 1 else [0.0])]
        return list(dict.fromkeys([self._chosen, *settings]))

    def _replay(self, limits: BatchLimits) -> Replayed:
        clients = {name: ClientTrace(self._source_of[name], tuple(steps)) for name, steps in self._steps.items()}
        return replay(clients, self._inference, limits, max(6 * len(clients), 240))


def _sizes(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    sizes, power = [1], 2
    while power <= most:
        sizes += [power, power * 3 // 2]
        power *= 2
    return sizes
