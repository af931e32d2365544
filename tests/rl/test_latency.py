# SPDX-License-Identifier: Apache-2.0
"""Declared durations: distributions, streams and times by batch size."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodix_rl.latency import BatchTime, Durations, spend


def _draws(durations: Durations, number: int, seed: int = 0) -> np.ndarray:
    stream = durations.stream((7, seed))
    return np.array([stream.draw() for _ in range(number)])


def test_constant_durations_are_constant():
    assert set(_draws(Durations(0.25), 50)) == {0.25}


@pytest.mark.parametrize("sigma", [0.25, 0.5])
def test_lognormal_durations_have_the_declared_mean_and_sigma(sigma):
    drawn = _draws(Durations(0.2, kind="lognormal", sigma=sigma), 20_000)
    assert drawn.mean() == pytest.approx(0.2, rel=0.02)
    assert np.log(drawn).std() == pytest.approx(sigma, rel=0.02)
    assert np.median(drawn) == pytest.approx(0.2 * np.exp(-(sigma**2) / 2), rel=0.02)


def test_stragglers_are_as_many_and_as_slow_as_declared():
    durations = Durations(0.1, straggler_probability=0.1, straggler_factor=5.0)
    drawn = _draws(durations, 20_000)
    assert set(np.round(drawn, 6)) == {0.1, 0.5}
    assert (drawn > 0.3).mean() == pytest.approx(0.1, abs=0.01)
    assert drawn.mean() == pytest.approx(durations.expected_s, rel=0.03)


def test_streams_repeat_by_seed_and_differ_between_ranks():
    durations = Durations(1.0, kind="lognormal", sigma=0.5)
    assert np.array_equal(_draws(durations, 20, seed=1), _draws(durations, 20, seed=1))
    assert not np.any(_draws(durations, 20, seed=1) == _draws(durations, 20, seed=2))


def test_kinds_draw_stragglers_at_the_same_places():
    straggling = {"straggler_probability": 0.2, "straggler_factor": 100.0}
    constant = _draws(Durations(1.0, **straggling), 200)
    lognormal = _draws(Durations(1.0, kind="lognormal", sigma=0.1, **straggling), 200)
    assert np.array_equal(constant > 10, lognormal > 10)
    assert 0 < (constant > 10).sum() < 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mean_s": -1.0}, "mean_s"),
        ({"mean_s": float("inf")}, "mean_s"),
        ({"kind": "normal"}, "constant, lognormal"),
        ({"sigma": 0.5}, "no sigma"),
        ({"straggler_probability": 1.5}, "within"),
    ],
)
def test_impossible_durations_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Durations(**fields)


def test_durations_of_a_config():
    assert Durations.of(0.5) == Durations(0.5)
    assert Durations.of({"mean_s": 0.5, "kind": "lognormal", "sigma": 1.0}).sigma == 1.0
    with pytest.raises(ValueError, match=r"no mean; its fields are mean_s"):
        Durations.of({"mean": 1.0})


@given(st.dictionaries(st.integers(1, 64), st.floats(0, 10), min_size=1), st.integers(1, 128))
def test_times_by_batch_size_pass_through_the_points_and_rise(points, size):
    times = sorted(points.values())
    declared = BatchTime(dict(zip(sorted(points), times, strict=True)))
    for known, seconds in declared.points.items():
        assert declared.seconds(known) == pytest.approx(seconds)
    assert declared.seconds(size) <= declared.seconds(size + 1) + 1e-9


def test_times_between_and_beyond_the_points_are_on_straight_lines():
    declared = BatchTime({2: 0.2, 4: 0.3, 8: 0.4})
    assert [declared.seconds(size) for size in (1, 3, 6, 12)] == pytest.approx([0.2, 0.25, 0.35, 0.5])


@pytest.mark.parametrize("points", [{}, {0: 0.1}, {1: 0.2, 2: 0.1}, {1: -0.1}])
def test_impossible_times_by_batch_size_are_refused(points):
    with pytest.raises(ValueError, match="batch"):
        BatchTime(points)


def test_spending_counts_what_has_passed_already():
    begun = time.perf_counter()
    spend(0.05, begun)
    assert time.perf_counter() - begun >= 0.05
    begun = time.perf_counter() - 10
    spend(0.05, begun)
    assert time.perf_counter() - begun < 10.04
