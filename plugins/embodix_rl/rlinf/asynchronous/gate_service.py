# SPDX-License-Identifier: Apache-2.0
"""The driver's side of generation: the staleness gate by messages, and how often simulators may be restarted."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable

from embodix_rl.rlinf.asynchronous.exchange import Adopted, Asks, Delivered, Event, SimulatorsLost
from embodix_rl.rlinf.hosts import WorkerFailedError
from embodix_rl.scheduling.channels import Receive, Send
from embodix_rl.scheduling.staleness import FinishedSample, StalenessGate, Ticket

HOUR_S = 3600.0


class RestartBudget:
    """At most `per_hour` restarts in any sliding hour.

    Raises:
        ValueError: a negative budget.
    """

    def __init__(self, per_hour: int) -> None:
        if per_hour < 0:
            raise ValueError(f"Restarts per hour must be 0 or more, got {per_hour}.")
        self._per_hour = per_hour
        self._spent: deque[float] = deque()
        self.total = 0

    def spend(self, now: float) -> bool:
        """Whether one more restart is allowed at `now`; if so, it counts."""
        while self._spent and self._spent[0] <= now - HOUR_S:
            self._spent.popleft()
        if len(self._spent) >= self._per_hour:
            return False
        self._spent.append(now)
        self.total += 1
        return True

    def describe(self, now: float) -> str:
        """What was spent, for a person."""
        recent = sum(moment > now - HOUR_S for moment in self._spent)
        return f"{recent} of {self._per_hour} restarts in the last hour, {self.total} in all"


class GateService:
    """Serves a gate to shards and rollout workers.

    Args:
        gate: of the run.
        events: what shards and rollout workers say.
        tickets: where a shard gets its leave; None tells it that the run needs no more.
        restarts: that simulators may take; none if None.
    """

    def __init__(
        self,
        gate: StalenessGate,
        events: Receive[Event],
        tickets: Callable[[str], Send[Ticket | None]],
        restarts: RestartBudget | None = None,
    ) -> None:
        self._gate, self._events, self._tickets = gate, events, tickets
        self._restarts, self._num_told = restarts or RestartBudget(0), 0
        self._metrics: list[dict[str, list[float]]] = []

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            ValueError: a message that the gate can't follow, such as a ticket that was used twice.
            WaitTimeout: a shard waited for leave too long.
            WorkerFailedError: simulators were lost more often than they may be started again.
        """
        async with asyncio.TaskGroup() as admissions:
            while True:
                event = await self._events.receive()
                if isinstance(event, Asks):
                    admissions.create_task(self._admit(event.shard), name=f"leave for {event.shard}")
                elif isinstance(event, Delivered):
                    self._metrics.append(event.metrics)
                    await self._gate.finish(FinishedSample(event.ticket, event.ticket.who, event.valid))
                elif isinstance(event, SimulatorsLost):
                    self._allow_restart(event)
                else:
                    assert isinstance(event, Adopted)
                    await self._gate.adopt(event.worker, event.version)

    def pop_metrics(self) -> dict[str, float]:
        """Means over the episodes that ended since the last call, and their number, as RLinf's runners have it."""
        values: dict[str, list[float]] = {}
        for metrics in self._metrics:
            for name, of_episodes in metrics.items():
                values.setdefault(name, []).extend(of_episodes)
        self._metrics.clear()
        means = {name: sum(several) / len(several) for name, several in values.items() if several}
        number = float(max(map(len, values.values()), default=0))
        return {**means, "env/num_trajectories": number} if means else {}

    def pop_restarts(self) -> int:
        """Restarts of simulators since the last call."""
        restarts, self._num_told = self._restarts.total - self._num_told, self._restarts.total
        return restarts

    def _allow_restart(self, lost: SimulatorsLost) -> None:
        now = asyncio.get_running_loop().time()
        if not self._restarts.spend(now):
            raise WorkerFailedError(
                f"{lost.reason}\n{lost.worker} may not start them again: {self._restarts.describe(now)} "
                "(runner.options.restarts_per_hour)."
            )
        print(f"{lost.reason}\n{lost.worker} starts them again: {self._restarts.describe(now)}.", file=sys.stderr)

    async def _admit(self, shard: str) -> None:
        await self._tickets(shard).send(await self._gate.admit(shard))
