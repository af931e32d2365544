# SPDX-License-Identifier: Apache-2.0
"""Over random speeds: no sample older than the bound, none used twice, none lost, none thrown away, and it ends."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodix_rl.scheduling.staleness import FinishedSample, GateSettings, StalenessGate, Ticket
from embodix_rl.scheduling.virtual_clock import run_virtually
from embodix_rl.scheduling.waiting import WaitTimeout


async def take_batch(gate: StalenessGate) -> list[FinishedSample]:
    """Everything that the batch being filled still lacks."""
    batch, taken = gate.filling, []
    while gate.filling == batch:
        taken.append(await gate.take())
    return taken


async def train_all(
    gate: StalenessGate,
    num_generators: int,
    generate_s: tuple[float, ...],
    train_s: float,
    adopt_s: float = 0.0,
    accidents: float = 0.0,
    seed: int = 0,
) -> list[list[FinishedSample]]:
    """Run generators at their speeds and one trainer until all batches are trained; returns the batches.

    A share `accidents` of the trajectories fails and is handed in as invalid.
    """
    draws = random.Random(seed)

    async def generate(index: int) -> None:
        who = f"env {index}"
        while (ticket := await gate.admit(who)) is not None:
            await asyncio.sleep(draws.choice(generate_s) * (1 + index))
            if draws.random() >= accidents:
                await gate.finish(FinishedSample(ticket, ticket.number))
            else:
                await gate.finish(FinishedSample(ticket, None, valid=False))

    async def adopt(version: int) -> None:
        await asyncio.sleep(adopt_s)
        await gate.adopt("rollout 0", version)

    async def train() -> list[list[FinishedSample]]:
        batches, adopting = [], []
        await gate.adopt("rollout 0", gate.version)
        while not gate.is_over:
            batches.append(await take_batch(gate))
            await asyncio.sleep(train_s)
            await gate.advance(gate.version + 1)
            if adopting:
                await adopting[-1]
            adopting.append(asyncio.create_task(adopt(gate.version)))
        await asyncio.gather(*adopting)
        return batches

    generators = [asyncio.create_task(generate(index), name=f"env {index}") for index in range(num_generators)]
    batches = await train()
    await asyncio.gather(*generators)
    return batches


SPEEDS = st.sampled_from([0.0, 0.1, 1.0, 7.0])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), max_staleness=st.integers(0, 4), num_batches=st.integers(1, 3))
def test_no_sample_is_stale_used_twice_lost_or_thrown_away_and_the_run_ends(data, max_staleness, num_batches):
    batch_size = data.draw(st.integers(1, 15))
    queue_depth = data.draw(st.none() | st.integers(1, 3 * batch_size))
    bounds = GateSettings(batch_size, max_staleness, queue_depth, num_batches, data.draw(st.integers(0, 2)))
    gate = StalenessGate(bounds, deadline_s=10_000)
    batches = run_virtually(
        train_all(
            gate,
            data.draw(st.integers(1, 7)),
            tuple(data.draw(st.lists(SPEEDS, min_size=1, max_size=4))),
            data.draw(SPEEDS),
            data.draw(SPEEDS),
            data.draw(st.sampled_from([0.0, 0.3])),
            data.draw(st.integers(0, 5)),
        )
    )
    assert [len(batch) for batch in batches] == [batch_size] * num_batches
    numbers = [one.ticket.number for batch in batches for one in batch]
    assert len(set(numbers)) == len(numbers)
    for index, batch in enumerate(batches):
        for one in batch:
            assert 0 <= bounds.first_version + index - one.ticket.version <= max_staleness
    counts = gate.counts
    assert counts.taken == counts.finished == num_batches * batch_size and counts.discarded == 0
    assert counts.admitted == counts.finished >= counts.masked
    assert sum(counts.staleness.values()) == counts.taken
    assert gate.num_under_way == 0 and gate.is_over


def test_a_producer_three_times_faster_than_the_trainer_waits_and_discards_nothing():
    gate = StalenessGate(GateSettings(batch_size=6, max_staleness=2, num_batches=20))
    run_virtually(train_all(gate, 3, (0.0,), 1.0))
    assert gate.counts.discarded == 0 and gate.counts.staleness == Counter({2: 18 * 6, 1: 6, 0: 6})


def test_queue_depth_bounds_what_is_under_way_and_staleness_does_not():
    async def most_under_way(queue_depth: int | None) -> tuple[int, Counter[int]]:
        gate = StalenessGate(GateSettings(4, 3, queue_depth, num_batches=8))
        most = 0

        async def watch() -> None:
            nonlocal most
            while not gate.is_over:
                most = max(most, gate.num_under_way)
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        await train_all(gate, 20, (0.01,), 1.0)
        await watching
        return most, gate.counts.staleness

    deep, stale = run_virtually(most_under_way(None))
    shallow, fresh = run_virtually(most_under_way(5))
    assert (deep, max(stale)) == (12, 3)
    assert shallow == 5 and max(fresh) <= 3
    assert stale[3] > 2 * fresh[3]


class Unpaced(StalenessGate):
    """The stock behaviour: generation is never held back."""

    def may_admit(self) -> bool:
        return True


def test_without_the_gate_samples_are_too_old_or_left_over():
    gate = Unpaced(GateSettings(6, 1, num_batches=6))
    batches = run_virtually(train_all(gate, 3, (0.05,), 1.0))
    ages = [index - one.ticket.version for index, batch in enumerate(batches) for one in batch]
    assert max(ages) > 1 and gate.counts.discarded > 0


class FirstDone(StalenessGate):
    """Takes what finished first and keeps no room for earlier deadlines."""

    def _takeable(self) -> FinishedSample | None:
        return self._finished[0] if self._finished and self.version == self.filling else None


@pytest.mark.parametrize(("kind", "too_old"), [(FirstDone, True), (StalenessGate, False)])
def test_room_is_kept_for_a_straggler(kind, too_old):
    """One generator is much slower; those that overtake it must leave it its place in its batch."""
    gate = kind(GateSettings(3, 1, num_batches=5))

    async def straggle() -> list[int]:
        async def generate(who: str, seconds: float) -> None:
            while (ticket := await gate.admit(who)) is not None:
                await asyncio.sleep(seconds)
                await gate.finish(FinishedSample(ticket, None))

        tasks = [asyncio.create_task(generate(*one)) for one in [("slow", 10.0), ("fast", 0.1), ("faster", 0.07)]]
        ages = []
        while not gate.is_over:
            batch = gate.filling
            ages += [batch - one.ticket.version for one in await take_batch(gate)]
            await gate.advance(batch + 1)
        await asyncio.gather(*tasks)
        return ages

    ages = run_virtually(straggle())
    assert len(ages) == 15 and (max(ages) > 1) == too_old


def test_time_outs_name_who_is_waited_for():
    async def trainer_waits() -> None:
        gate = StalenessGate(GateSettings(2), deadline_s=5.0)
        await gate.admit("env 3")
        await gate.take()

    with pytest.raises(WaitTimeout, match="trainer waits for env 3: samples of batch 0"):
        run_virtually(trainer_waits())

    async def worker_waits() -> None:
        gate = StalenessGate(GateSettings(1, max_staleness=0), deadline_s=5.0)
        await gate.admit("env 3")
        await gate.admit("env 4")

    with pytest.raises(WaitTimeout, match=r"env 4 waits for trainer: room for 1 samples of version 0 \(batch 0"):
        run_virtually(worker_waits())


def test_a_ticket_counts_once():
    async def hand_in_twice() -> None:
        gate = StalenessGate(GateSettings(4))
        ticket = await gate.admit("env 0")
        assert ticket is not None
        await gate.finish(FinishedSample(ticket, None))
        for again in (ticket, Ticket(7, 0, 1, "env 1")):
            with pytest.raises(ValueError, match="not under way"):
                await gate.finish(FinishedSample(again, None))

    run_virtually(hand_in_twice())


def test_a_lost_sample_keeps_its_place_at_zero_weight():
    async def crash() -> None:
        gate = StalenessGate(GateSettings(2, num_batches=1))
        first, second = await gate.admit("env 0"), await gate.admit("env 1")
        assert first is not None and second is not None
        await gate.finish(FinishedSample(second, "masked", valid=False))
        await gate.finish(FinishedSample(first, "whole"))
        assert {(one.payload, one.valid) for one in await take_batch(gate)} == {("whole", True), ("masked", False)}
        assert (gate.counts.masked, gate.counts.taken) == (1, 2) and await gate.admit("env 1") is None

    run_virtually(crash())


def test_versions_come_one_after_the_other():
    async def misuse() -> None:
        gate = StalenessGate(GateSettings(1))
        with pytest.raises(ValueError, match="batch 0 lacks 1 samples"):
            await gate.advance(1)
        ticket = await gate.admit("env 0")
        assert ticket is not None
        await gate.finish(FinishedSample(ticket, None))
        await gate.take()
        with pytest.raises(ValueError, match="After version 0 comes 1"):
            await gate.advance(2)
        await gate.advance(1)
        with pytest.raises(ValueError, match="to the newest, 1; got 2"):
            await gate.adopt("rollout 0", 2)
        await gate.adopt("rollout 0", 1)
        with pytest.raises(ValueError, match="from its own, 1"):
            await gate.adopt("rollout 0", 0)

    run_virtually(misuse())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"batch_size": 4, "max_staleness": -1}, "`max_staleness` must be at least 0"),
        ({"batch_size": 4, "num_batches": 0}, "`num_batches` must be at least 1"),
        ({"batch_size": 4, "queue_depth": 0}, "`queue_depth` must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        GateSettings(**wrong)


@pytest.mark.parametrize("stop_after", [1, 2])
def test_a_run_goes_on_from_a_checkpoint_with_its_queue(stop_after):
    async def first_part(gate: StalenessGate) -> list[FinishedSample]:
        trained = []
        for _ in range(stop_after):
            for _ in range(gate.num_under_way, 12):
                ticket = await gate.admit("env 0")
                assert ticket is not None
                await gate.finish(FinishedSample(ticket, ticket.number))
            trained += await take_batch(gate)
            await gate.advance(gate.version + 1)
        await gate.admit("env 0")  # lost with the process
        return trained

    bounds = GateSettings(6, 1, num_batches=4)
    gate = StalenessGate(bounds)
    trained = run_virtually(first_part(gate))
    resumed = StalenessGate(bounds)
    resumed.restore(gate.state())
    trained += [one for batch in run_virtually(train_all(resumed, 2, (0.1,), 1.0)) for one in batch]
    assert sorted(one.ticket.number for one in trained)[: 6 * stop_after] == list(range(6 * stop_after))
    assert len({one.ticket.number for one in trained}) == len(trained) == 4 * 6
    with pytest.raises(ValueError, match="past the deadline"):
        StalenessGate(bounds).restore(gate.state() | {"filling": 9})
