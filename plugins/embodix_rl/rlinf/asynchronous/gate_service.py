# SPDX-License-Identifier: Apache-2.0
"""The staleness gate, reached by messages: the driver's side of generation."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from embodix_rl.rlinf.asynchronous.exchange import Adopted, Asks, Delivered, Event, Lost
from embodix_rl.rlinf.faults import WorkerFailedError
from embodix_rl.scheduling.channels import Receive, Send
from embodix_rl.scheduling.staleness import Finished, StalenessGate, Ticket
from embodix_rl.scheduling.supervision import RestartBudget


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
                    await self._gate.finish(Finished(event.ticket, event.ticket.who, event.valid))
                elif isinstance(event, Lost):
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

    def _allow_restart(self, lost: Lost) -> None:
        now = asyncio.get_running_loop().time()
        if not self._restarts.spend(now):
            raise WorkerFailedError(
                f"{lost.reason}\n{lost.worker} may not start them again: {self._restarts.describe(now)} "
                "(runner.options.restarts_per_hour)."
            )
        print(f"{lost.reason}\n{lost.worker} starts them again: {self._restarts.describe(now)}.", file=sys.stderr)

    async def _admit(self, shard: str) -> None:
        await self._tickets(shard).send(await self._gate.admit(shard))
