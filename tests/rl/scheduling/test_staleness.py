# SPDX-License-Identifier: Apache-2.0
"""Over random speeds: no sample older than the bound, none used twice, none lost, none thrown away, and it ends."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodix_rl.scheduling.staleness import Finished, GateSettings, StalenessGate, Ticket
from embodix_rl.scheduling.waiting import WaitTimeout
from embodix_rl.testing.virtual_clock import run_virtually


async def train_all(
    gate: StalenessGate,
    num_generators: int,
    generate_s: tuple[float, ...],
    train_s: float,
    adopt_s: float = 0.0,
    accidents: float = 0.0,
    seed: int = 0,
) -> list[list[Finished]]:
    """Run generators at their speeds and one trainer until all batches are trained; returns the batches.

    A share `accidents` of the trajectories fails: half of those are handed in as invalid, half are given back.
    """
    draws = random.Random(seed)

    async def generate(index: int) -> None:
        who = f"env {index}"
        while (ticket := await gate.admit(who)) is not None:
            await asyncio.sleep(draws.choice(generate_s) * (1 + index))
            if draws.random() >= accidents:
                await gate.finish(Finished(ticket, ticket.number))
            elif draws.random() < 0.5:
                await gate.finish(Finished(ticket, None, valid=False))
            else:
                await gate.abandon(ticket)

    async def adopt(version: int) -> None:
        await asyncio.sleep(adopt_s)
        await gate.adopt("rollout 0", version)

    async def train() -> list[list[Finished]]:
        batches, adopting = [], []
        await gate.adopt("rollout 0", gate.version)
        while not gate.is_over:
            batches.append(await gate.take_batch())
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
    admission_size = data.draw(st.integers(1, 3))
    batch_size = admission_size * data.draw(st.integers(1, 5))
    queue_depth = data.draw(st.none() | st.integers(admission_size, 3 * batch_size))
    bounds = GateSettings(
        batch_size, max_staleness, queue_depth, admission_size, num_batches, data.draw(st.integers(0, 2))
    )
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
    assert [sum(one.ticket.size for one in batch) for batch in batches] == [batch_size] * num_batches
    numbers = [one.ticket.number for batch in batches for one in batch]
    assert len(set(numbers)) == len(numbers)
    for index, batch in enumerate(batches):
        for one in batch:
            assert 0 <= bounds.first_version + index - one.ticket.version <= max_staleness
    counts = gate.counts
    assert counts.taken == counts.finished == num_batches * batch_size and counts.discarded == 0
    assert counts.admitted == counts.finished + counts.abandoned
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

    def _takeable(self) -> Finished | None:
        return self._finished[0] if self._finished and self.version == self.filling else None


@pytest.mark.parametrize(("kind", "too_old"), [(FirstDone, True), (StalenessGate, False)])
def test_room_is_kept_for_a_straggler(kind, too_old):
    """One generator is much slower; those that overtake it must leave it its place in its batch."""
    gate = kind(GateSettings(3, 1, num_batches=5))

    async def straggle() -> list[int]:
        async def generate(who: str, seconds: float) -> None:
            while (ticket := await gate.admit(who)) is not None:
                await asyncio.sleep(seconds)
                await gate.finish(Finished(ticket, None))

        tasks = [asyncio.create_task(generate(*one)) for one in [("slow", 10.0), ("fast", 0.1), ("faster", 0.07)]]
        ages = []
        while not gate.is_over:
            batch = gate.filling
            ages += [batch - one.ticket.version for one in await gate.take_batch()]
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
        await gate.finish(Finished(ticket, None))
        for again in (gate.finish(Finished(ticket, None)), gate.abandon(ticket)):
            with pytest.raises(ValueError, match="not under way"):
                await again
        with pytest.raises(ValueError, match="not under way"):
            await gate.abandon(Ticket(7, 0, 1, 1, "env 1"))

    run_virtually(hand_in_twice())


def test_what_a_failed_worker_had_under_way_keeps_its_place_at_zero_weight():
    async def crash() -> None:
        gate = StalenessGate(GateSettings(4, admission_size=2, num_batches=1))
        first, second = await gate.admit("env 0"), await gate.admit("env 1")
        assert first is not None and second is not None
        assert await gate.lose("env 1", "masked") == [second]
        await gate.finish(Finished(first, "whole"))
        assert {(one.payload, one.valid) for one in await gate.take_batch()} == {("whole", True), ("masked", False)}
        assert (gate.counts.masked, gate.counts.taken) == (2, 4) and await gate.admit("env 1") is None

    run_virtually(crash())


def test_versions_come_one_after_the_other():
    async def misuse() -> None:
        gate = StalenessGate(GateSettings(1))
        with pytest.raises(ValueError, match="batch 0 lacks 1 samples"):
            await gate.advance(1)
        ticket = await gate.admit("env 0")
        assert ticket is not None
        await gate.finish(Finished(ticket, None))
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
        ({"batch_size": 10, "admission_size": 4}, r"got batch_size=10, the nearest that fit are \[8, 12\]"),
        ({"batch_size": 2, "admission_size": 4}, r"the nearest that fit are \[4\]"),
        ({"batch_size": 4, "max_staleness": -1}, "`max_staleness` must be at least 0"),
        ({"batch_size": 4, "num_batches": 0}, "`num_batches` must be at least 1"),
        ({"batch_size": 4, "admission_size": 2, "queue_depth": 1}, "`queue_depth` must hold one admission of 2"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        GateSettings(**wrong)


@pytest.mark.parametrize("stop_after", [1, 2])
def test_a_run_goes_on_from_a_checkpoint_with_its_queue(stop_after):
    async def first_part(gate: StalenessGate) -> list[Finished]:
        trained = []
        for _ in range(stop_after):
            for _ in range(gate.num_under_way // 2, 6):
                ticket = await gate.admit("env 0")
                assert ticket is not None
                await gate.finish(Finished(ticket, ticket.number))
            trained += await gate.take_batch()
            await gate.advance(gate.version + 1)
        await gate.admit("env 0")  # lost with the process
        return trained

    bounds = GateSettings(6, 1, admission_size=2, num_batches=4)
    gate = StalenessGate(bounds)
    trained = run_virtually(first_part(gate))
    resumed = StalenessGate(bounds)
    resumed.restore(gate.state())
    trained += [one for batch in run_virtually(train_all(resumed, 2, (0.1,), 1.0)) for one in batch]
    assert sorted(one.ticket.number for one in trained)[: 6 * stop_after // 2] == list(range(6 * stop_after // 2))
    assert len({one.ticket.number for one in trained}) == len(trained) == 4 * 6 // 2
    with pytest.raises(ValueError, match="past the deadline"):
        StalenessGate(bounds).restore(gate.state() | {"filling": 9})
