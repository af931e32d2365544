# SPDX-License-Identifier: Apache-2.0
"""Lost simulators: who hears of it, what goes on, when a run gives up; with real processes, without RLinf."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from embodix_rl.rlinf.asynchronous.components import answer_of, innermost
from embodix_rl.rlinf.asynchronous.exchange import EVENTS, Asks, ChannelReceive, ChannelSend, Delivered, SimulatorsLost
from embodix_rl.rlinf.asynchronous.gate_service import GateService, RestartBudget
from embodix_rl.rlinf.asynchronous.supervised_simulators import SupervisedSimulators
from embodix_rl.rlinf.hosts import WorkerFailedError
from embodix_rl.rlinf.simulator_process import RemoteSimulators, SimulatorDeadlines, SimulatorLostError
from embodix_rl.scheduling.staleness import GateSettings, StalenessGate
from embodix_rl.scheduling.virtual_clock import run_virtually
from embodix_rl.testing.failing_environment import FailingEnvironment


class Events:
    """RLinf's interface of a channel that is only put to and got from in one event loop."""

    def __init__(self) -> None:
        self._items: asyncio.Queue = asyncio.Queue()

    def put(self, item, key, async_op):
        return _Work(self._items.put(item))

    def get(self, key, async_op):
        return _Work(self._items.get())


class _Work:
    def __init__(self, coroutine) -> None:
        self._coroutine = coroutine

    async def async_wait(self):
        return await self._coroutine


def _supervised(deadline_s=60.0, **failing):
    remote = RemoteSimulators("env 1", SimulatorDeadlines(deadline_s, 60.0))
    begun = []
    supervised = SupervisedSimulators(
        "env 1", remote, lambda: begun.append([env.reset()[0]["episode"] for env in envs])
    )
    envs = supervised.do_now(lambda: [remote.build(FailingEnvironment, first=first, **failing) for first in (0, 100)])
    return supervised, envs, begun


def test_one_shards_crash_costs_the_others_their_trajectory_and_nothing_more():
    async def run() -> None:
        heard: list[SimulatorsLost] = []

        async def tell(lost: SimulatorsLost) -> None:
            heard.append(lost)

        async def trajectory(number: int, orders: list[str]) -> list[str] | None:
            await supervised.do(envs[number].reset, life=None, tell=tell)
            life, answers = supervised.life, []
            try:
                for order in orders:
                    answers.append(await supervised.do(envs[number].chunk_step, order, life=life, tell=tell))
                    await asyncio.sleep(0.01)
            except SimulatorLostError:
                return None
            return answers

        both = await asyncio.gather(trajectory(0, ["go", "crash"]), trajectory(1, ["go"] * 50))
        assert both == [None, None] and len(heard) == 1
        assert heard[0].worker == "env 1" and "exit code -9" in heard[0].reason
        assert begun == [[3, 103]]
        assert await asyncio.gather(trajectory(0, ["go"]), trajectory(1, ["go"])) == [["go"], ["go"]]
        assert len(heard) == 1 and supervised.life == 1
        supervised.stop()

    supervised, envs, begun = _supervised()
    asyncio.run(run())


def test_a_restart_that_fails_is_told_and_tried_again():
    async def run() -> None:
        heard: list[str] = []

        async def tell(lost: SimulatorsLost) -> None:
            heard.append(lost.reason)
            if len(heard) == 3:
                raise WorkerFailedError("enough")  # as the end of the run

        with pytest.raises(WorkerFailedError, match="enough"):
            await supervised.do(envs[0].chunk_step, "exit", life=0, tell=tell)
        assert "exit code 7" in heard[0] and "told to fail while it is made" in heard[1]

    supervised, envs, begun = _supervised(fails_at=1)
    asyncio.run(run())
    assert begun == []


def test_stopping_ends_a_hang_and_starts_nothing_again():
    async def run() -> None:
        async def tell(lost: SimulatorsLost) -> None:
            assert "exit code -9" in lost.reason

        stopping = threading.Timer(0.3, supervised.stop)
        stopping.start()
        with pytest.raises(SimulatorLostError):
            await supervised.do(envs[0].chunk_step, "hang", life=0, tell=tell)

    supervised, envs, begun = _supervised()
    started = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - started < 30 and begun == []


def test_without_a_process_of_their_own_what_simulators_raise_is_their_workers():
    async def run() -> None:
        async def tell(lost: SimulatorsLost) -> None:
            raise AssertionError(lost)

        supervised = SupervisedSimulators("env 1", None, lambda: None)
        environment = FailingEnvironment(0)
        assert await supervised.do(environment.chunk_step, "go", life=0, tell=tell) == "go"
        with pytest.raises(IndexError, match="told to raise"):
            await supervised.do(environment.chunk_step, "raise", life=0, tell=tell)

    asyncio.run(run())


def _serve(restarts: RestartBudget, *events):
    """A gate's service that has heard `events`, with the failure that ended it."""

    async def run():
        gate = StalenessGate(GateSettings(2, 0, num_batches=1))
        channel, tickets = Events(), Events()
        service = GateService(
            gate, ChannelReceive(channel, EVENTS), lambda shard: ChannelSend(tickets, shard), restarts
        )
        serving = asyncio.ensure_future(service.run())
        for _ in range(2):
            await ChannelSend(channel, EVENTS).send(Asks("env 1 shard 0"))
            ticket = await ChannelReceive(tickets, "env 1 shard 0").receive()
            await ChannelSend(channel, EVENTS).send(Delivered(ticket, {}, valid=ticket.number > 0))
        for event in events:
            await ChannelSend(channel, EVENTS).send(event)
        await asyncio.sleep(1.0)
        taken = [await gate.take() for _ in range(gate.settings.batch_size)]
        failure = serving.exception() if serving.done() else None
        serving.cancel()
        return service, gate, taken, failure

    return run_virtually(run())


def test_a_masked_trajectory_keeps_its_place_in_the_batch():
    service, gate, taken, failure = _serve(RestartBudget(1), SimulatorsLost("env 1", "crashed"))
    assert failure is None and [one.valid for one in taken] == [False, True]
    assert (gate.counts.finished, gate.counts.masked, gate.counts.taken) == (2, 1, 2)
    assert (service.pop_restarts(), service.pop_restarts()) == (1, 0)


def test_a_run_whose_restarts_are_spent_ends_and_says_of_whom():
    lost = SimulatorsLost("env 1", "The simulators of env 1 crashed at chunk_step")
    service, _, _, failure = _serve(RestartBudget(2), lost, lost, lost)
    assert isinstance(failure, ExceptionGroup) and service.pop_restarts() == 2
    (error,) = failure.exceptions
    assert isinstance(error, WorkerFailedError)
    assert "crashed at chunk_step" in str(error) and "2 of 2 restarts in the last hour" in str(error)


class Answer:
    """A call of a worker group that takes `seconds`."""

    def __init__(self, seconds: float, *, fails: bool = False) -> None:
        self._seconds, self._fails = seconds, fails

    def wait(self):
        time.sleep(self._seconds)
        return None if self._fails else [None]

    def done(self):
        return not self._fails


def test_a_driver_that_ends_does_not_wait_for_the_dead():
    assert answer_of(Answer(0.0), 5.0) == [None]
    assert answer_of(Answer(0.0, fails=True), 5.0) is None
    assert answer_of(Answer(60.0), 0.1) is None


def test_a_failure_is_told_by_its_innermost_cause():
    told = ExceptionGroup("unhandled errors", [TimeoutError("Deadline passed: a waits for b\nmore")])
    remote = RuntimeError("a long trace")
    remote.cause = told
    assert innermost(remote) == "TimeoutError: Deadline passed: a waits for b"
    assert innermost(OSError()) == "OSError: no message"
