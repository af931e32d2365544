# SPDX-License-Identifier: Apache-2.0
"""The cost model, given and fitted."""

from __future__ import annotations

import numpy as np
import pytest

from embodix.packing.sample_cost import CostModel, MeasuredBin, SampleSizes, fit_cost

SIZES = SampleSizes(np.array([10, 20, 90]), np.array([1, 1, 3]), num_actions=10)


def measured(model: CostModel, num_bins: int, noise: float = 0.0, seed: int = 0) -> list[MeasuredBin]:
    """Bins of random samples, timed by a model."""
    generator = np.random.default_rng(seed)
    sizes = SampleSizes(generator.integers(100, 900, 500), generator.integers(1, 4, 500))
    bins = []
    for _ in range(num_bins):
        samples = generator.integers(0, 500, generator.integers(4, 12))
        seconds = float(model.costs(sizes)[samples].sum()) * (1 + noise * generator.standard_normal())
        bins.append(MeasuredBin.of(samples, sizes, seconds))
    return bins


def test_costs_add_up():
    model = CostModel(tokens=2.0, tokens_squared=0.5, images=100.0)
    assert model.costs(SIZES).tolist() == [340.0, 610.0, 5500.0]
    assert MeasuredBin.of(np.array([0, 2]), SIZES, 1.0) == MeasuredBin(120, 400 + 10_000, 4, 1.0)


def test_in_token_units_the_mean_sample_costs_its_tokens():
    scaled = CostModel(tokens=3e-6, images=2e-3).in_tokens(SIZES)
    assert scaled.costs(SIZES).mean() == pytest.approx(SIZES.tokens.mean())
    assert scaled.images / scaled.tokens == pytest.approx(2e-3 / 3e-6)


@pytest.mark.parametrize(
    "model",
    [
        CostModel(3e-6),
        CostModel(3e-6, images=2e-3),
        CostModel(3e-6, tokens_squared=4e-9),
        CostModel(3e-6, 4e-9, 2e-3),
    ],
)
def test_a_fit_finds_the_model(model):
    fitted = fit_cost(measured(model, 40))
    wanted = (model.tokens, model.tokens_squared, model.images)
    assert (fitted.tokens, fitted.tokens_squared, fitted.images) == pytest.approx(wanted, rel=1e-3, abs=1e-12)


def test_noise_adds_no_term_and_no_negative_coefficient():
    for seed in range(20):
        fitted = fit_cost(measured(CostModel(3e-6), 40, noise=0.03, seed=seed))
        assert fitted.tokens == pytest.approx(3e-6, rel=0.1)
        assert min(fitted.tokens_squared, fitted.images) >= 0


def test_bins_that_are_all_alike_are_explained_by_tokens():
    """As a token budget makes them: nothing can be told about images."""
    alike = [MeasuredBin(5000, 3_000_000, 16, 0.5 + 0.001 * index) for index in range(10)]
    assert fit_cost(alike).images == fit_cost(alike).tokens_squared == 0


def test_too_few_bins_or_none_that_took_time_fit_nothing():
    assert fit_cost(measured(CostModel(), 3)) is None
    assert fit_cost([MeasuredBin(5000, 3_000_000, 16, 0.0)] * 10) is None


def test_wrong_coefficients_are_refused():
    with pytest.raises(ValueError, match="none negative and one above zero"):
        CostModel(tokens=-1.0)
    with pytest.raises(ValueError, match="none negative and one above zero"):
        CostModel.from_mapping({})
    with pytest.raises(ValueError, match="got also pixels"):
        CostModel.from_mapping({"tokens": 1, "pixels": 2})


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="two one-dimensional arrays"):
        SampleSizes(np.ones(3, dtype=int), np.ones(2, dtype=int))
    with pytest.raises(ValueError, match="one prefix token at least"):
        SampleSizes(np.zeros(3, dtype=int), np.ones(3, dtype=int))
