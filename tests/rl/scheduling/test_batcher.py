# SPDX-License-Identifier: Apache-2.0
"""A batch leaves at B_max or T_max, in order, with nothing lost and nobody waiting longer than promised."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodix_rl.scheduling.batcher import Batch, BatchLimits, DynamicBatcher, FixedLimits, InferenceRequest
from embodix_rl.scheduling.channels import ChannelClosed, Mailbox
from embodix_rl.scheduling.virtual_clock import run_virtually
from embodix_rl.scheduling.waiting import WaitTimeout
from embodix_rl.testing.closed_loop import constant, lognormal, serve_clients

Arrivals = Sequence[tuple[float, int]]


async def batches_of(
    arrivals: Arrivals, limits: BatchLimits, inference_s: float = 0.0, cancel_after: Sequence[float] = ()
) -> list[Batch[int]]:
    """The batches of requests that arrive after gaps of given seconds with given sizes.

    With `cancel_after`, calls of `next_batch` are cancelled after so many seconds, in turn.
    """
    inbox = Mailbox[InferenceRequest[int]]("rollout")
    batcher = DynamicBatcher(inbox, FixedLimits(limits))
    loop = asyncio.get_running_loop()

    async def arrive() -> None:
        for number, (gap, size) in enumerate(arrivals):
            await asyncio.sleep(gap)
            await inbox.send(InferenceRequest(number, size, sent_at=loop.time()))
        await inbox.close()

    sender = asyncio.create_task(arrive())
    patience, batches = list(cancel_after), []
    while True:
        try:
            async with asyncio.timeout(patience.pop() if patience else None):
                batches.append(await batcher.next_batch())
        except TimeoutError:
            continue
        except ChannelClosed:
            break
        await asyncio.sleep(inference_s)
    await sender
    assert await batcher.close() == []
    return batches


ARRIVALS = st.lists(st.tuples(st.sampled_from([0.0, 0.01, 0.1, 0.5, 2.0]), st.integers(1, 4)), min_size=1, max_size=25)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    arrivals=ARRIVALS,
    max_size=st.integers(4, 9),
    max_wait_s=st.sampled_from([0.0, 0.05, 0.3, 5.0, float("inf")]),
    inference_s=st.sampled_from([0.0, 0.2, 1.0]),
    cancel_after=st.lists(st.sampled_from([0.0, 0.01, 0.2, 1.0]), max_size=8),
)
def test_every_request_leaves_once_in_order_within_both_limits(
    arrivals, max_size, max_wait_s, inference_s, cancel_after
):
    limits = BatchLimits(max_size, max_wait_s)
    batches = run_virtually(batches_of(arrivals, limits, inference_s, cancel_after))
    assert [request.payload for batch in batches for request in batch.requests] == list(range(len(arrivals)))
    arrived = [sum(gap for gap, _ in arrivals[: index + 1]) for index in range(len(arrivals))]
    free_at, seen = 0.0, 0
    for batch in batches:
        size = len(batch.requests)
        assert 1 <= size <= max_size
        assert batch.arrived_at == pytest.approx(arrived[seen : seen + size])
        seen += size
        first = max(batch.arrived_at[0], free_at)
        assert batch.left_at <= max(first, batch.arrived_at[0] + max_wait_s, batch.arrived_at[-1]) + 1e-6
        if not cancel_after and batch.reason == "waited":
            assert batch.left_at >= batch.arrived_at[0] + max_wait_s - 1e-6
            assert not [t for t in arrived[seen:] if t < batch.left_at - 1e-6]
        free_at = batch.left_at + inference_s


def test_the_clock_of_a_batch_starts_at_its_first_arrival():
    batches = run_virtually(batches_of([(5.0, 1), (0.2, 1), (0.2, 1), (0.2, 1)], BatchLimits(10, 0.5)))
    assert [(len(batch.requests), round(batch.left_at, 3), batch.reason) for batch in batches] == [
        (3, 5.5, "waited"),
        (1, 5.6, "closed"),
    ]


def test_a_request_that_arrived_during_inference_has_waited_already():
    """It came 0.1 s after the batch left: when the server is free its 0.5 s are over."""
    batches = run_virtually(batches_of([(0.0, 1), (0.6, 1), (5.0, 1)], BatchLimits(10, 0.5), inference_s=1.0))
    assert [round(batch.left_at, 3) for batch in batches][:2] == [0.5, 1.5]


def test_a_posted_receive_is_carried_over_and_never_waited_for():
    """The stock server waits for the shard after T_max; here one shard leaves alone and the next opens a batch."""
    batches = run_virtually(batches_of([(0.0, 1), (60.0, 1)], BatchLimits(2, 0.02)))
    assert [round(batch.left_at, 3) for batch in batches] == [0.02, 60.0]


def test_requests_are_counted_and_their_samples_added_up():
    sizes = [(0.0, size) for size in (3, 3, 1, 4)]
    batches = run_virtually(batches_of(sizes, BatchLimits(4, 1.0)))
    assert [batch.num_samples for batch in batches] == [11]


def test_limits_out_of_range_are_refused():
    for wrong in ({"max_size": 0, "max_wait_s": 1.0}, {"max_size": 1, "max_wait_s": -1.0}):
        with pytest.raises(ValueError, match="must be"):
            BatchLimits(**wrong)


def test_waiting_for_a_first_request_has_a_deadline():
    async def wait() -> None:
        batcher = DynamicBatcher(
            Mailbox[InferenceRequest[Any]]("rollout"), FixedLimits(BatchLimits(1, 1.0)), deadline_s=40.0
        )
        await batcher.next_batch()

    with pytest.raises(WaitTimeout, match="rollout waits for env workers: a request"):
        run_virtually(wait())


def test_a_failing_channel_is_not_swallowed():
    class Broken:
        async def receive(self) -> InferenceRequest[Any]:
            await asyncio.sleep(1)
            raise ConnectionError("the channel's process died")

    async def wait() -> None:
        await DynamicBatcher(Broken(), FixedLimits(BatchLimits(1, 1.0))).next_batch()

    with pytest.raises(ConnectionError, match="process died"):
        run_virtually(wait())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_clients=st.integers(1, 9),
    max_size=st.integers(1, 12),
    max_wait_s=st.sampled_from([0.0, 0.02, 0.2, 1.0]),
    inference_s=st.sampled_from([0.01, 0.1, 0.6]),
    sigma=st.sampled_from([0.0, 0.5]),
    step_s=st.sampled_from([0.02, 0.3]),
)
def test_no_request_waits_longer_than_t_max_plus_one_inference(
    num_clients, max_size, max_wait_s, inference_s, sigma, step_s
):
    """Where all clients fit into one batch; else one more inference for each batch that those before it fill."""
    steps = [lognormal(step_s, sigma, seed) if sigma else constant(step_s) for seed in range(num_clients)]
    limits = FixedLimits(BatchLimits(max_size, max_wait_s))
    horizon_s = 8 * (max_wait_s + inference_s + step_s)
    served = run_virtually(serve_clients(limits, steps, lambda size: inference_s, horizon_s))
    assert len(served.batches) >= 5
    num_batches_before = (num_clients - 1) // max_size
    for _, batch in served.batches:
        assert batch.longest_wait_s <= max_wait_s + (1 + num_batches_before) * inference_s + 1e-9
