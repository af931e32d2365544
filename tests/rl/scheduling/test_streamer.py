# SPDX-License-Identifier: Apache-2.0
"""Micro-batches hold every trajectory once, start as early as they may, and normalise exactly."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodix_rl.scheduling.streamer import (
    AdvantageMoments,
    MicroBatchStreamer,
    OptimizerStepDue,
    Prepare,
    Scale,
    StreamedSample,
    Train,
)


def stream(streamer: MicroBatchStreamer, samples: list[StreamedSample]) -> list[tuple[int, object]]:
    """The work with the number of samples that had arrived when it was set free."""
    return [(place, work) for place, sample in enumerate(samples, 1) for work in streamer.add(sample)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    micro_batch_size=st.integers(1, 6),
    num_micro_batches=st.integers(1, 4),
    normalization=st.sampled_from(["none", "previous", "exact"]),
)
def test_every_trajectory_is_trained_once(seed, micro_batch_size, num_micro_batches, normalization):
    batch_size = micro_batch_size * num_micro_batches
    streamer = MicroBatchStreamer(batch_size, micro_batch_size, normalization)
    draws = random.Random(seed)
    for batch in range(3):
        samples = [StreamedSample(place, AdvantageMoments.of([float(place)])) for place in range(batch_size)]
        draws.shuffle(samples)
        work = stream(streamer, samples)
        for kind in (Prepare, Train):
            parts = [one for _, one in work if isinstance(one, kind)]
            assert sorted(sample.payload for part in parts for sample in part.samples) == list(range(batch_size))
            assert [part.index for part in parts] == list(range(num_micro_batches))
            assert {len(part.samples) for part in parts} == {micro_batch_size}
        arrived, last = work[-1]
        assert last == OptimizerStepDue() and arrived == batch_size
        trained_early = [place for place, one in work if isinstance(one, Train) and place < batch_size]
        if normalization == "exact" or (normalization == "previous" and batch == 0):
            assert not trained_early
        else:
            assert len(trained_early) == num_micro_batches - 1
    assert streamer.missing == batch_size


VALUES = st.lists(st.lists(st.integers(-1000, 1000), max_size=5), min_size=4, max_size=4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(values=VALUES, offset=st.sampled_from([0.0, 1e6]), seed=st.integers(0, 100))
def test_exact_normalisation_is_that_of_the_whole_batch_in_any_order(values, offset, seed):
    """Masked trajectories have no valid element and change nothing."""
    values = [[value + offset for value in row] for row in values]
    order = list(range(4))
    random.Random(seed).shuffle(order)
    samples = [StreamedSample(place, AdvantageMoments.of(values[place])) for place in order]
    work = stream(MicroBatchStreamer(4, 2, "exact"), samples)
    (scale,) = {one.scale for _, one in work if isinstance(one, Train)}
    everything = np.concatenate([np.array(row, dtype=np.float64) for row in values])
    assert work[-1][1] == OptimizerStepDue()
    if everything.size:
        assert scale.mean == pytest.approx(everything.mean(), rel=1e-12, abs=1e-9)
        assert scale(scale.mean) == 0.0
    if everything.size > 1:
        assert scale.deviation == pytest.approx(everything.std(ddof=1) + 1e-5, rel=1e-9)


def test_previous_normalisation_is_the_batch_befores_for_all_micro_batches():
    streamer = MicroBatchStreamer(4, 2, "previous")
    batches = [[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0], [5.0, 5.0, 5.0, 5.0]]
    scales = []
    for values in batches:
        work = stream(streamer, [StreamedSample(value, AdvantageMoments.of([value])) for value in values])
        scales.append({one.scale for _, one in work if isinstance(one, Train)})
    own = [AdvantageMoments.of(values).scale() for values in batches]
    assert scales == [{own[0]}, {own[0]}, {own[1]}]
    resumed = MicroBatchStreamer(4, 2, "previous")
    resumed.restore(streamer.state())
    (first, *_) = [one for one in stream(resumed, [StreamedSample(0), StreamedSample(0)]) if isinstance(one[1], Train)]
    assert first[1].scale == own[2]


def test_an_exact_batch_prepares_early_and_trains_late():
    work = stream(MicroBatchStreamer(4, 2), [StreamedSample(place) for place in range(4)])
    assert [(place, type(one).__name__, getattr(one, "index", None)) for place, one in work] == [
        (2, "Prepare", 0),
        (4, "Prepare", 1),
        (4, "Train", 0),
        (4, "Train", 1),
        (4, "OptimizerStepDue", None),
    ]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(parts=st.lists(st.lists(st.integers(-100, 100), max_size=5), min_size=1, max_size=6))
def test_moments_of_parts_are_those_of_the_whole(parts):
    total = sum((AdvantageMoments.of(part) for part in parts), AdvantageMoments())
    whole = AdvantageMoments.of([value for part in parts for value in part])
    assert (total.count, total.mean) == (whole.count, pytest.approx(whole.mean, abs=1e-9))
    assert total.squares == pytest.approx(whole.squares, rel=1e-9, abs=1e-7)


def test_a_single_value_is_not_divided_by_nothing():
    assert AdvantageMoments.of([3.0]).scale() == Scale(3.0, 1e-5)
    assert AdvantageMoments().scale() == Scale(0.0, 1e-5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((10, 4), "`batch_size` must be a multiple of 4, got 10; the nearest is 8"),
        ((4, 2, "running"), "`normalization` must be one of"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        MicroBatchStreamer(*sizes)


def test_a_batch_that_is_masked_leaves_the_scale_of_the_one_before():
    streamer = MicroBatchStreamer(2, 1, normalization="previous")
    scales = []
    for batch in ([1.0, 3.0], [], [2.0, 4.0]):
        for place in range(2):
            work = streamer.add(StreamedSample(None, advantages=AdvantageMoments.of(batch[place : place + 1])))
            scales += [one.scale for one in work if isinstance(one, Train)]
    first = AdvantageMoments.of([1.0, 3.0]).scale()
    assert scales == [first] * 6
