# SPDX-License-Identifier: Apache-2.0
"""Sample orders: proportions, walks without replacement, windows of files, the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodix.data.order import MixtureOrder, ShuffledOrder, WindowShuffledOrder

SEEDS = st.integers(0, 2**32 - 1)
LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=5)


def count_opens(files: list[int], num_open: int) -> int:
    """Opens of a reader that keeps the ``num_open`` files used last."""
    opened: list[int] = []
    opens = 0
    for file in files:
        if file in opened:
            opened.remove(file)
        else:
            opens += 1
        opened = [*opened, file][-num_open:]
    return opens


@given(num_samples=st.integers(1, 500), seed=SEEDS, epoch=st.integers(0, 50))
def test_a_shuffled_epoch_is_a_permutation_that_depends_on_seed_and_epoch_alone(
    num_samples: int, seed: int, epoch: int
) -> None:
    drawn = ShuffledOrder(num_samples, seed).epoch(epoch)
    assert drawn.dtype == np.int64
    assert sorted(drawn) == list(range(num_samples))
    assert (drawn == ShuffledOrder(num_samples, seed).epoch(epoch)).all()


def test_epochs_and_seeds_differ() -> None:
    order = ShuffledOrder(100, seed=1)
    assert (order.epoch(0) != order.epoch(1)).any()
    assert (order.epoch(0) != ShuffledOrder(100, seed=2).epoch(0)).any()


@given(groups=st.lists(st.integers(0, 12), min_size=1, max_size=300), window=st.integers(1, 6), seed=SEEDS)
def test_a_window_of_files_is_read_to_its_end_before_the_next(groups: list[int], window: int, seed: int) -> None:
    order = WindowShuffledOrder(groups, window, seed)
    drawn = order.epoch(3)
    assert drawn.dtype == np.int64
    assert sorted(drawn) == list(range(len(groups)))
    files = [groups[index] for index in drawn]
    assert count_opens(files, num_open=window) == len(set(groups)) == order.num_files
    for first in range(0, len(set(files)), window):
        window_files = list(dict.fromkeys(files))[first : first + window]
        places = [place for place, file in enumerate(files) if file in window_files]
        assert places == list(range(places[0], places[-1] + 1))


def test_a_window_lowers_the_opens_of_a_reader_tenfold_and_keeps_the_samples() -> None:
    groups = np.repeat(np.arange(4), 50 * 20)
    windowed = WindowShuffledOrder(groups, window=2, seed=0).epoch(0)
    shuffled = ShuffledOrder(len(groups), seed=0).epoch(0)
    opens = count_opens(list(groups[windowed]), num_open=2)
    assert count_opens(list(groups[shuffled]), num_open=2) >= 10 * opens
    assert sorted(windowed) == sorted(shuffled)
    first_batch = groups[windowed[:64]]
    assert set(np.bincount(first_batch) > 16) == {False, True} and len(set(first_batch)) == 2


@given(lengths=LENGTHS, seed=SEEDS, epoch=st.integers(0, 9))
def test_without_weights_every_sample_comes_once_an_epoch(lengths: list[int], seed: int, epoch: int) -> None:
    order = MixtureOrder(lengths, None, seed)
    assert order.quotas == lengths
    drawn = order.epoch(epoch)
    assert drawn.dtype == np.int64
    assert sorted(drawn) == list(range(sum(lengths)))
    assert (drawn == MixtureOrder(lengths, None, seed).epoch(epoch)).all()


@settings(max_examples=60)
@given(
    members=st.lists(st.tuples(st.integers(1, 400), st.floats(0.05, 1.0)), min_size=1, max_size=5),
    seed=SEEDS,
    num_draws=st.integers(100, 900),
)
def test_walks_are_without_replacement_across_epochs(
    members: list[tuple[int, float]], seed: int, num_draws: int
) -> None:
    lengths, weights = [m[0] for m in members], [m[1] for m in members]
    order = MixtureOrder(lengths, weights, seed, num_draws)
    assert sum(order.quotas) == num_draws
    drawn = np.concatenate([order.epoch(epoch) for epoch in range(4)])
    offset = 0
    for length, quota, weight in zip(lengths, order.quotas, weights, strict=True):
        assert abs(quota - num_draws * weight / sum(weights)) < 1
        own = drawn[(drawn >= offset) & (drawn < offset + length)] - offset
        assert len(own) == 4 * quota
        for start in range(0, len(own), length):
            walk = own[start : start + length]
            assert len(set(walk)) == len(walk)
        offset += length


@settings(max_examples=60)
@given(weights=st.lists(st.floats(0.05, 1.0), min_size=2, max_size=4), seed=SEEDS, start=st.integers(0, 4000))
def test_members_are_interleaved_evenly(weights: list[float], seed: int, start: int) -> None:
    lengths = [1000] * len(weights)
    order = MixtureOrder(lengths, weights, seed, num_draws=5000)
    member = order.epoch(0) // 1000
    stretch = member[start : start + 500]
    for k, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs((member == k).mean() - share) <= 0.02
        assert abs((stretch == k).sum() - share * len(stretch)) <= 2 * (1 + len(weights))


def test_two_members_of_unequal_size_keep_their_weights() -> None:
    order = MixtureOrder([12_000, 300], [0.7, 0.3], seed=0, num_draws=5000)
    assert order.quotas == [3500, 1500]
    counts = np.bincount(order.epoch(0)[order.epoch(0) >= 12_000] - 12_000)
    assert counts.min() == counts.max() == 5


def test_members_are_walked_in_the_order_they_ask_for() -> None:
    groups = np.repeat(np.arange(5), 20)
    order = MixtureOrder(
        [100, 50], None, seed=0, orders=[WindowShuffledOrder(groups, 1, seed=0), ShuffledOrder(50, seed=1)]
    )
    drawn = order.epoch(0)
    assert count_opens(list(groups[drawn[drawn < 100]]), num_open=1) == 5


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ShuffledOrder(0, 0), "one sample at least"),
        (lambda: WindowShuffledOrder([], 1, 0), "one sample at least"),
        (lambda: WindowShuffledOrder([0], 0, 0), "window=0"),
        (lambda: MixtureOrder([], None, 0), "one sample each"),
        (lambda: MixtureOrder([3, 0], None, 0), "one sample each"),
        (lambda: MixtureOrder([3, 4], [1.0], 0), "1 weights for 2"),
        (lambda: MixtureOrder([3, 4], [1.0, 0.0], 0), "positive"),
        (lambda: MixtureOrder([3, 4], [1.0, float("nan")], 0), "positive"),
        (lambda: MixtureOrder([3, 4], [1.0, 1e-9], 0), "one draw an epoch"),
        (lambda: MixtureOrder([3], None, 0, orders=[ShuffledOrder(2, 0)]), "draws all of its samples"),
    ],
)
def test_impossible_orders_are_refused(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]
