# SPDX-License-Identifier: Apache-2.0
"""Time jumps to the next timer, always in the same order, and a deadlock says who waits for whom."""

from __future__ import annotations

import asyncio
import time

import pytest

from embodix_rl.scheduling import virtual_clock
from embodix_rl.scheduling.channels import ChannelClosed, Mailbox
from embodix_rl.scheduling.virtual_clock import Deadlock, run_virtually
from embodix_rl.scheduling.waiting import WaitTimeout, current_waits, waiting


def test_hours_take_no_time():
    async def sleep_long() -> float:
        await asyncio.gather(*(asyncio.sleep(3600.0 * hours) for hours in range(1, 60)))
        return asyncio.get_running_loop().time()

    began = time.perf_counter()
    assert run_virtually(sleep_long()) == 59 * 3600.0
    assert time.perf_counter() - began < 2


def test_tasks_run_in_the_order_of_their_timers_every_time():
    async def order() -> list[int]:
        done: list[int] = []

        async def one(index: int) -> None:
            for _ in range(3):
                await asyncio.sleep((index * 7 % 5) / 10)
            done.append(index)

        await asyncio.gather(*(one(index) for index in range(10)))
        return done

    first = run_virtually(order())
    assert [index * 7 % 5 for index in first] == sorted(index * 7 % 5 for index in range(10))
    assert run_virtually(order()) == first


def test_a_deadlock_names_the_tasks_and_where_they_are():
    async def embrace() -> None:
        first, second = Mailbox[int]("first"), Mailbox[int]("second")

        async def pass_on(source: Mailbox[int], target: Mailbox[int]) -> None:
            await target.send(await source.receive())

        loop = asyncio.get_running_loop()
        tasks = [
            loop.create_task(pass_on(first, second), name="env 0"),
            loop.create_task(pass_on(second, first), name="rollout 0"),
        ]
        await asyncio.gather(*tasks)

    with pytest.raises(Deadlock, match=r"(?s)t=0.000 s.*env 0 at .*rollout 0 at ") as caught:
        run_virtually(embrace())
    assert "test_virtual_clock.py" in str(caught.value)


def test_turning_for_ever_without_waiting_is_found(monkeypatch):
    monkeypatch.setattr(virtual_clock, "MAX_TURNS_AT_ONE_TIME", 1000)

    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Deadlock, match="1000 turns at t=0"):
        run_virtually(spin())


def test_a_deadline_names_who_waits_for_whom_and_since_when():
    async def wait() -> None:
        await asyncio.sleep(5)
        async with waiting("rollout 0", "env workers", "a request", 30.0):
            seen.extend(current_waits())
            await asyncio.Event().wait()

    seen: list[object] = []
    message = r"rollout 0 waits for env workers: a request, since t=5.000 s \(30.000 s of at most 30 s\)"
    with pytest.raises(WaitTimeout, match=message):
        run_virtually(wait())
    assert len(seen) == 1 and not current_waits()


def test_a_deadline_of_the_body_is_not_taken_for_ones_own():
    async def wait() -> None:
        async with waiting("outer", "inner", "its end", 30.0), waiting("inner", "nobody", "anything", 3.0):
            await asyncio.Event().wait()

    with pytest.raises(WaitTimeout, match="inner waits for nobody"):
        run_virtually(wait())

    async def own_error() -> None:
        async with waiting("outer", "inner", "its end", 30.0):
            raise TimeoutError("of the body")

    with pytest.raises(TimeoutError, match="of the body"):
        run_virtually(own_error())


def test_a_mailbox_keeps_order_and_depth_and_ends():
    async def use() -> tuple[list[int], float]:
        box = Mailbox[int]("trainer", depth=2)

        async def fill() -> None:
            for item in range(5):
                await box.send(item)
            await box.close()

        filling = asyncio.create_task(fill())
        got, most = [], 0
        await asyncio.sleep(1)
        with pytest.raises(ChannelClosed):
            while True:
                most = max(most, len(box))
                got.append(await box.receive())
                await asyncio.sleep(1)
        await filling
        with pytest.raises(ChannelClosed):
            await box.send(9)
        return got, most

    assert run_virtually(use()) == ([0, 1, 2, 3, 4], 2)


def test_a_full_mailbox_times_out_with_the_receivers_name():
    async def overfill() -> None:
        box = Mailbox[int]("trainer", depth=1, deadline_s=2.0)
        await box.send(1)
        await box.send(2)

    with pytest.raises(WaitTimeout, match="waits for trainer: room for more than 1 items"):
        run_virtually(overfill())
