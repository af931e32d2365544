# SPDX-License-Identifier: Apache-2.0
"""B_max and T_max chosen online serve as much as the best fixed ones, settle, and follow a change."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodix_rl.scheduling.adaptive import AdaptiveLimits, ClientTrace, InferenceTime, replay
from embodix_rl.scheduling.batcher import Batch, BatchLimits, FixedLimits, InferenceRequest
from embodix_rl.scheduling.virtual_clock import run_virtually
from embodix_rl.testing.closed_loop import constant, lognormal, serve_clients

HORIZON_S = 80.0
INFERENCE = {
    "flat": lambda size: 0.1,
    "linear": lambda size: 0.05 * size,
    "affine": lambda size: 0.06 + 0.02 * size,
    "padded": lambda size: 0.04 + 0.03 * (1 << (size - 1).bit_length()),
}
STEPS = {
    "even": lambda mean_s: [constant(mean_s)] * 8,
    "stragglers": lambda mean_s: [lognormal(mean_s, 0.5, seed) for seed in range(8)],
    "uneven": lambda mean_s: [constant(mean_s * (0.5 + index / 4)) for index in range(8)],
}
PATTERNS = [("even", 0.05, 1), ("even", 0.6, 1), ("stragglers", 0.2, 2), ("uneven", 0.2, 1)]
FIXED = [(1, 0.0), *((size, wait) for size in (2, 4, 8) for wait in (0.0, 0.2))]


def served_per_s(policy, steps, inference, shards):
    """Requests per second in the second half."""
    served = run_virtually(serve_clients(policy, steps, inference, HORIZON_S, shards))
    return served.rate(HORIZON_S / 2, HORIZON_S)


@pytest.mark.parametrize("inference", INFERENCE)
@pytest.mark.parametrize(("steps", "mean_s", "shards"), PATTERNS)
def test_adaptive_limits_serve_as_much_as_the_best_fixed_ones(inference, steps, mean_s, shards):
    run = partial(served_per_s, inference=INFERENCE[inference], shards=shards)
    best = max(run(FixedLimits(BatchLimits(*fixed)), STEPS[steps](mean_s)) for fixed in FIXED)
    adaptive = run(AdaptiveLimits(8), STEPS[steps](mean_s))
    assert adaptive >= 0.95 * best


def test_the_choice_settles_and_follows_a_change():
    """Clients that become slow make waiting for all of them a loss."""
    slow = [0.02]
    policy = AdaptiveLimits(8)
    steps = [lambda: slow[0] for _ in range(8)]

    def inference_s(size: int) -> float:
        return 0.1

    chosen: list[BatchLimits] = []
    choose = policy.choose

    def record(now: float) -> None:
        choose(now)
        chosen.append(policy.limits())
        if len(chosen) == 5:
            slow[0] = 1.5

    policy.choose = record
    served = run_virtually(serve_clients(policy, steps, inference_s, 400.0))
    assert chosen[0] == chosen[4] and chosen[0].max_size == 8 and chosen[0].max_wait_s > 0
    assert chosen[-1] == chosen[-2]
    assert served.rate(300.0, 400.0) >= 0.95 * 8 / (1.5 + 0.1)


def test_clients_that_are_gone_are_not_waited_for():
    """One client stops for good; the others are then served as if it had never been."""
    steps = [constant(0.02)] * 4 + [iter([0.02] * 400 + [1e9]).__next__]
    served = run_virtually(serve_clients(AdaptiveLimits(8), steps, INFERENCE["flat"], 300.0))
    assert served.rate(200.0, 300.0) >= 0.95 * 4 / (0.02 + 0.1)


def test_choices_become_rare_where_nothing_changes():
    policy = AdaptiveLimits(4)
    served = run_virtually(serve_clients(policy, [constant(0.1)] * 4, INFERENCE["affine"], 120.0))
    num_requests = sum(len(batch.requests) for _, batch in served.batches)
    assert policy.num_choices <= 4 + num_requests / (64 * 4)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    capacity=st.integers(1, 6),
    longest_wait_s=st.sampled_from([0.0, 0.05, 1.0]),
    means=st.lists(st.sampled_from([0.01, 0.1, 0.4]), min_size=1, max_size=8),
    inference=st.sampled_from(sorted(INFERENCE)),
)
def test_limits_stay_within_their_bounds(capacity, longest_wait_s, means, inference):
    steps = [lognormal(mean, 0.8, seed) for seed, mean in enumerate(means)]
    policy = AdaptiveLimits(capacity, longest_wait_s=longest_wait_s)
    served = run_virtually(serve_clients(policy, steps, INFERENCE[inference], 10.0))
    for _, batch in served.batches:
        assert len(batch.requests) <= capacity
        slowest = max(INFERENCE[inference](size) for size in range(1, capacity + 1))
        num_batches_before = len(means) - 1
        assert batch.longest_wait_s <= longest_wait_s + (1 + num_batches_before) * slowest + 1e-9


def test_adaptive_limits_need_the_clients_names_and_sane_settings():
    policy = AdaptiveLimits(4)
    with pytest.raises(ValueError, match="must name its `client`"):
        policy.observe(Batch((InferenceRequest(None),), (0.0,), 0.0, "full"), 0.1)
    for wrong in ({"capacity": 0}, {"capacity": 1, "longest_wait_s": -1}, {"capacity": 1, "tolerance": 1.0}):
        with pytest.raises(ValueError, match="must be at least"):
            AdaptiveLimits(**wrong)


def test_inference_time_is_the_mean_where_measured_and_a_line_elsewhere():
    time = InferenceTime()
    with pytest.raises(ValueError, match="No inference"):
        time(1)
    for size, seconds in [(1, 0.08), (1, 0.08), (3, 0.12), (3, 0.12), (5, 0.16)]:
        time.observe(size, seconds)
    assert time.sizes == {1, 3}
    assert [time(1), time(3), time(8)] == pytest.approx([0.08, 0.12, 0.22])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(points=st.lists(st.tuples(st.integers(1, 16), st.floats(0.001, 2.0)), min_size=1, max_size=30))
def test_inference_time_is_never_negative_nor_falls_beyond_what_was_measured(points):
    time = InferenceTime()
    for size, seconds in points:
        time.observe(size, seconds)
    unmeasured = [time(size) for size in range(1, 40) if size not in time.sizes]
    assert min(unmeasured) >= 0
    assert unmeasured == sorted(unmeasured) or pytest.approx(sorted(unmeasured)) == unmeasured


@pytest.mark.parametrize(("max_size", "max_wait_s"), [(1, 0.0), (4, 0.0), (4, 0.05), (8, 0.0)])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_replay_serves_what_the_batcher_serves(max_size, max_wait_s, shards):
    """The worse of two phases, so never more than what a run serves; and not much less."""
    draws = [lognormal(0.2, 0.5, seed) for seed in range(8)]
    worked = [[draw() for _ in range(400)] for draw in draws]
    clients = {str(index): ClientTrace(str(index // shards), worked[index]) for index in range(8)}
    limits = BatchLimits(max_size, max_wait_s)
    predicted = replay(clients, INFERENCE["affine"], limits, 800).requests_per_s
    steps = [partial(next, iter(trace)) for trace in worked]
    served = run_virtually(serve_clients(FixedLimits(limits), steps, INFERENCE["affine"], 40.0, shards))
    assert served.rate(8.0, 40.0) == pytest.approx(predicted, rel=0.04)


def test_what_takes_no_time_is_served_without_limit():
    clients = {str(index): ClientTrace(str(index), [0.0] * 4) for index in range(3)}
    assert replay(clients, lambda size: 0.0, BatchLimits(3, 0.0), 60).requests_per_s == math.inf
