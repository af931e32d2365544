# SPDX-License-Identifier: Apache-2.0
"""Gate, protocol and conductor together: environment workers that die are restarted, their trajectories masked."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodix_rl.scheduling.conductor import Conductor, RunFailedError
from embodix_rl.scheduling.protocol import Deadlines, DrainMode, RunProtocol, Stage
from embodix_rl.scheduling.staleness import Finished, GateSettings, StalenessGate
from embodix_rl.scheduling.supervision import RestartBudget
from embodix_rl.testing.virtual_clock import run_virtually

DEADLINES = Deadlines(start_s=30.0, drain_s=100.0, cut_s=10.0)


class FlakyWorker:
    """Generates under the gate; in each life it dies after so many chunk steps, or never."""

    def __init__(self, name: str, gate: StalenessGate, lives: list[int | None], draws: random.Random) -> None:
        self._name, self._gate, self._lives, self._draws = name, gate, lives, draws
        self._work: asyncio.Task[None] | None = None

    async def start(self, is_restart: bool) -> None:
        if is_restart:
            await self._gate.lose(self._name)

    async def run(self) -> None:
        steps_left = self._lives.pop(0) if self._lives else None
        while (ticket := await self._gate.admit(self._name)) is not None:
            for _ in range(4):
                await asyncio.sleep(self._draws.choice([0.1, 0.5]))
                if steps_left is not None:
                    steps_left -= 1
                    if steps_left < 0:
                        raise EOFError("the simulator's process died")
            await self._gate.finish(Finished(ticket, self._name))

    async def drain(self, mode: DrainMode) -> None:
        if mode == "cut":
            raise ConnectionError("its process is busy")  # the conductor kills what does not answer

    async def kill(self) -> None: ...


class Trainer:
    """Takes batch after batch."""

    def __init__(self, gate: StalenessGate) -> None:
        self._gate = gate
        self.weights: list[float] = []

    async def start(self, is_restart: bool) -> None: ...

    async def run(self) -> None:
        while not self._gate.is_over:
            batch = await self._gate.take_batch()
            self.weights += [float(finished.valid) for finished in batch]
            await asyncio.sleep(1.0)
            await self._gate.advance(self._gate.version + 1)

    async def drain(self, mode: DrainMode) -> None:
        raise ConnectionError("its process is busy")

    async def kill(self) -> None: ...


def run_flaky(lives: list[list[int | None]], restarts: int, num_batches: int, seed: int = 0):
    """A run of flaky workers; returns the gate, the trainer, the protocol and the report of a failure."""

    async def run():
        gate = StalenessGate(GateSettings(4, 1, num_batches=num_batches), deadline_s=300.0)
        trainer, draws = Trainer(gate), random.Random(seed)
        workers = {
            f"env {index}": FlakyWorker(f"env {index}", gate, list(own), draws) for index, own in enumerate(lives)
        }
        stages = [Stage(("trainer",), ends_run=True), Stage(tuple(workers), may_restart=True, may_end=True)]
        conductor = Conductor(RunProtocol(stages, RestartBudget(restarts), DEADLINES), {"trainer": trainer, **workers})
        report = ""
        try:
            await conductor.run()
        except RunFailedError as error:
            report = str(error)
        return gate, trainer, conductor.protocol, report

    return run_virtually(run())


LIVES = st.lists(st.lists(st.integers(0, 12), max_size=4), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lives=LIVES, num_batches=st.integers(1, 4), seed=st.integers(0, 3))
def test_a_run_with_flaky_workers_ends_normally_with_masked_trajectories(lives, num_batches, seed):
    gate, trainer, protocol, report = run_flaky(lives, restarts=20, num_batches=num_batches, seed=seed)
    assert report == ""
    assert len(trainer.weights) == 4 * num_batches == gate.counts.taken
    assert trainer.weights.count(0.0) == gate.counts.masked <= len(protocol.failures)
    assert gate.counts.discarded == 0 and gate.num_under_way == 0
    assert max(gate.counts.staleness) <= 1


def test_restarts_are_counted_and_every_crash_masks_what_it_cut_off():
    gate, _, protocol, report = run_flaky([[6, 2], [None]], restarts=5, num_batches=5)
    assert report == "" and [failure.who for failure in protocol.failures] == ["env 0", "env 0"]
    assert gate.counts.masked == 2


def test_twenty_crashes_in_a_row_stop_the_run_with_a_report():
    *_, protocol, report = run_flaky([[0] * 20, [None]], restarts=6, num_batches=1000)
    assert len([failure for failure in protocol.failures if failure.who == "env 0"]) == 7
    assert "env 0 failed: EOFError: the simulator's process died; 6 of 6 restarts in the last hour" in report


@pytest.mark.parametrize("forget", [True, False])
def test_a_lost_ticket_would_block_its_batch(forget, monkeypatch):
    """Masking is what lets a run go on: without it the trainer waits for the dead worker, and says so."""
    if forget:

        async def lose_nothing(self, who, payload=None):
            return []

        monkeypatch.setattr(StalenessGate, "lose", lose_nothing)
    *_, report = run_flaky([[6], [None]], restarts=5, num_batches=4)
    assert ("trainer waits for env 0" in report) == forget
