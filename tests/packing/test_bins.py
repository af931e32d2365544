# SPDX-License-Identifier: Apache-2.0
"""Bins hold every sample once, keep their limits, and are nearly full."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodix.packing.bins import (
    MAX_UNITS,
    Bins,
    Limits,
    best_fit,
    first_fit_decreasing,
    level_end,
    unfillable_rest,
    whole_units,
)
from embodix.packing.sample_cost import CostModel, SampleSizes
from embodix.packing.token_budget import TokenBudgetPacker

ALGORITHMS = [best_fit, first_fit_decreasing]


def libero_like(num_samples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two cameras, a prompt of 45 to 65 tokens, 50 action tokens."""
    prompts = np.random.default_rng(seed).integers(45, 66, num_samples)
    return (512 + prompts + 50).astype(float), np.full(num_samples, 2)


def mixture_like(num_samples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Half one camera and 20 prompt tokens, half three cameras and 150, 50 action tokens."""
    is_small = np.random.default_rng(seed).random(num_samples) < 0.5
    return np.where(is_small, 326.0, 968.0), np.where(is_small, 1, 3)


DISTRIBUTIONS = [libero_like, mixture_like]


def plain_first_fit_decreasing(costs: np.ndarray, budget: float) -> list[list[int]]:
    """The textbook's loops."""
    bins: list[list[int]] = []
    for position in sorted(range(len(costs)), key=lambda index: -costs[index]):
        home = next((b for b in bins if costs[b].sum() + costs[position] <= budget), None)
        if home is None:
            bins.append([position])
        else:
            home.append(position)
    return sorted(map(sorted, bins))


@pytest.mark.parametrize("pack", ALGORITHMS)
@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=80),
    budget=st.integers(40, 200),
    look_ahead=st.integers(1, 90),
    max_samples=st.none() | st.integers(1, 6),
    max_images=st.none() | st.integers(3, 9),
    scale=st.sampled_from([1.0, 0.37]),
)
def test_every_sample_once_within_all_limits(pack, sizes, budget, look_ahead, max_samples, max_images, scale):
    costs, images = (np.array(column) for column in zip(*sizes, strict=True))
    samples = np.arange(len(sizes)) * 10
    limits = Limits(budget * scale, max_samples, max_images)
    bins = pack(samples, costs * scale, images, limits, look_ahead)
    assert sorted(bins.samples_N) == list(samples)
    assert bins.num_samples.min() >= 1
    by_sample = np.zeros(len(sizes) * 10)
    by_sample[samples] = costs * scale
    assert bins.sums(by_sample).max() <= limits.budget * (1 + 1e-9)
    for index in range(len(bins)):
        members = bins[index] // 10
        assert max_samples is None or members.size <= max_samples
        assert max_images is None or images[members].sum() <= max_images
    again = pack(samples, costs * scale, images, limits, look_ahead)
    assert np.array_equal(again.samples_N, bins.samples_N) and np.array_equal(again.ends_K, bins.ends_K)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(costs=st.lists(st.integers(1, 30), min_size=1, max_size=60), budget=st.integers(30, 90))
def test_first_fit_decreasing_is_the_textbooks(costs, budget):
    sizes = np.array(costs, dtype=float)
    bins = first_fit_decreasing(np.arange(sizes.size), sizes, np.zeros_like(sizes, dtype=int), Limits(budget), 1000)
    assert sorted(sorted(bins[index].tolist()) for index in range(len(bins))) == plain_first_fit_decreasing(
        sizes, budget
    )


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("samples_per_bin", [8, 12, 16, 32])
def test_best_fit_uses_ninety_nine_percent_of_the_budget(distribution, samples_per_bin):
    costs, images = distribution(20_000)
    budget = float(np.floor(costs.mean() * samples_per_bin))
    bins = best_fit(np.arange(costs.size), costs, images, Limits(budget))
    assert bins.sums(costs).mean() >= 0.99 * budget
    assert bins.num_samples.mean() == pytest.approx(samples_per_bin, rel=0.01)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("seed", range(5))
def test_a_chosen_budget_is_filled_although_the_mean_one_is_not(distribution, seed):
    """Where samples come in two sizes, a budget just below four of each leaves room that nothing fills."""
    costs, images = distribution(5_000, seed)
    sizes = SampleSizes(costs.astype(int), images)
    bins = TokenBudgetPacker().compose(np.arange(costs.size), sizes, 8.0, CostModel())
    budget = bins.sums(costs).max()
    assert bins.sums(costs).mean() >= 0.99 * budget
    assert 8 * costs.mean() * 0.99 <= budget <= 8 * costs.mean() * 1.02
    assert bins.num_samples.mean() == pytest.approx(8, rel=0.02)


def test_bins_mix_sizes_and_stay_near_the_order():
    """A step of one size only would be a biased gradient: each bin has both kinds, and none waits long."""
    costs, images = mixture_like(20_000)
    bins = best_fit(np.arange(costs.size), costs, images, Limits(8 * 647.0), look_ahead=256)
    kinds = [np.unique(costs[bins[index]]).size for index in range(len(bins))]
    assert np.mean(kinds) > 1.9
    place_in_bins = np.argsort(bins.samples_N)
    assert np.abs(place_in_bins - np.arange(costs.size)).max() < 2 * 256


@pytest.mark.parametrize("pack", ALGORITHMS)
def test_a_sample_larger_than_the_budget_is_named(pack):
    with pytest.raises(ValueError, match=r"Sample 7 alone costs 12.*budget of 10.*to 12 at least"):
        pack(np.array([3, 7]), np.array([4.0, 12.0]), np.zeros(2, dtype=int), Limits(10))
    with pytest.raises(ValueError, match="Sample 3 alone has 5 images, more than max_images=4"):
        pack(np.array([3, 7]), np.array([4.0, 2.0]), np.array([5, 1]), Limits(10, max_images=4))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("num_samples", [13, 100, 3001])
def test_the_last_bins_of_an_epoch_share_what_is_left(distribution, num_samples):
    costs, images = distribution(num_samples)
    bins = best_fit(np.arange(num_samples), costs, images, Limits(8.2 * costs.mean()))
    loads = bins.sums(costs)
    assert loads[-1] >= 0.85 * loads[-64:].max()


def test_levelling_breaks_no_limit_and_keeps_earlier_bins():
    costs, images = libero_like(1000)
    positions = Bins(np.arange(1000), np.append(np.arange(8, 1000, 8), 1000))
    levelled = level_end(positions, costs, images, Limits(5016))
    assert np.array_equal(levelled.samples_N[: 8 * (125 - 64)], np.arange(8 * (125 - 64)))
    assert sorted(levelled.samples_N) == list(range(1000))
    tight = Limits(float(positions.sums(costs).max()), max_images=15)
    assert level_end(positions, costs, images, tight) is positions


def test_unfillable_rest_is_what_no_combination_reaches():
    rest = unfillable_rest(np.array([6, 10]), 25)
    reachable = {6 * a + 10 * b for a in range(5) for b in range(3)}
    assert rest.tolist() == [amount - max(r for r in reachable if r <= amount) for amount in range(26)]


def test_whole_tokens_stay_exact_and_other_costs_are_rounded_up():
    units, budget = whole_units(np.array([3.0, 7.0]), 100.0)
    assert (units.tolist(), budget) == ([3, 7], 100)
    costs = np.array([0.1, 33.3, 100.0])
    units, budget = whole_units(costs, 100.0)
    assert (units / budget >= costs / 100.0 - 1e-9).all() and units[-1] == budget
    units, budget = whole_units(np.array([3.0]), MAX_UNITS * 2.0)
    assert budget < MAX_UNITS and units[0] >= 1


@pytest.mark.parametrize("limits", [{"budget": 0}, {"budget": 5, "max_samples": 0}, {"budget": 5, "max_images": 0}])
def test_limits_below_one_are_refused(limits):
    with pytest.raises(ValueError, match="1 or more; got"):
        Limits(**limits)
