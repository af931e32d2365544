# SPDX-License-Identifier: Apache-2.0
"""Waits with a deadline, and what is told when it is over."""

import asyncio
import pickle

import pytest

from embodix_rl.scheduling.virtual_clock import run_virtually
from embodix_rl.scheduling.waiting import Wait, WaitTimeout, current_waits, waiting


def test_a_wait_that_is_over_says_who_waited_for_whom_and_is_listed_until_then():
    async def wait() -> None:
        async with waiting("rollout", "env workers", "a request", deadline_s=5.0):
            assert [one.whom for one in current_waits()] == ["env workers"]
            await asyncio.sleep(10.0)

    with pytest.raises(WaitTimeout, match=r"rollout waits for env workers: a request.*5.000 s of at most 5 s"):
        run_virtually(wait())
    assert current_waits() == []


def test_a_wait_that_is_over_says_so_in_another_process_too():
    error = WaitTimeout(Wait("rollout", "env workers", "a request", 1.0, 5.0), 6.0)
    told = pickle.loads(pickle.dumps(error))
    assert type(told) is WaitTimeout and str(told) == str(error) and told.wait == error.wait
