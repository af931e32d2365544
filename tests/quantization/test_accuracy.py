# SPDX-License-Identifier: Apache-2.0
"""Measures of accuracy: known ratios, exact and lost signals, and what a whole tensor's SQNR hides."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodix.quantization.accuracy import (
    ChunkAccuracy,
    Comparison,
    LayerAccuracy,
    LossAccuracy,
    action_errors,
    cosines,
    plain_numbers,
    relative_error,
    sqnr_db,
    worst_row_sqnr_db,
)
from embodix_fp8.blocks import quantize_blocks


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.floats(-40, 80), st.sampled_from([1e-20, 1.0, 1e20]))
def test_sqnr_is_the_ratio_that_noise_was_added_with(seed, decibels, scale):
    signal = normal(40, 30, seed=seed)
    noise = normal(40, 30, seed=seed + 1)
    noise *= signal.norm() / noise.norm() * 10 ** (-decibels / 20)
    got = scale * (signal.double() + noise.double())
    assert sqnr_db(scale * signal.double(), got) == pytest.approx(decibels, abs=1e-3)
    assert relative_error(scale * signal.double(), got) == pytest.approx(10 ** (-decibels / 20), rel=1e-3)


def test_equal_lost_and_broken_signals():
    signal = normal(3, 4)
    assert sqnr_db(signal, signal) == math.inf
    assert sqnr_db(torch.zeros(3), torch.ones(3)) == -math.inf
    assert sqnr_db(signal, signal * math.nan) == -math.inf
    assert sqnr_db(signal, signal * math.inf) == -math.inf
    assert worst_row_sqnr_db(signal, signal) == math.inf
    assert worst_row_sqnr_db(signal, torch.full_like(signal, math.nan)) == -math.inf
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0.0
    assert relative_error(torch.zeros(3), torch.ones(3)) == math.inf
    assert cosines(torch.zeros(2, 3), torch.stack([torch.zeros(3), torch.ones(3)])).tolist() == [1.0, 0.0]
    assert cosines(signal, -2 * signal).tolist() == pytest.approx([-1.0] * 3)
    assert math.isnan(float(cosines(signal, signal * math.nan)[0]))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-4, 0.1))
def test_a_small_orthogonal_error_costs_half_its_square_of_the_cosine(seed, error):
    signal, noise = normal(1, 200, seed=seed).double(), normal(1, 200, seed=seed + 1).double()
    noise -= (noise * signal).sum() / signal.square().sum() * signal
    got = signal + error * signal.norm() / noise.norm() * noise
    assert float(cosines(signal, got)[0]) == pytest.approx(1 - error**2 / 2, abs=error**4 + 1e-12)


def test_one_large_weight_hides_lost_rows_from_the_whole_tensors_sqnr():
    weight = normal(64, 64)
    weight[3, 5] = 1e7
    got = quantize_blocks(weight, tuple(weight.shape)).dequantize(torch.float32)
    assert sqnr_db(weight, got) > 60
    assert worst_row_sqnr_db(weight, got) < 3


def test_errors_of_action_dimensions_are_in_their_units():
    reference = torch.zeros(2, 3, 2)
    got = reference.clone()
    got[1, 2] = torch.tensor([0.3, -0.02])
    first, second = action_errors(reference, got, torch.tensor([1.0, 0.1]), ["x", "gripper"])
    assert (first.name, first.largest, first.unit) == ("x", pytest.approx(0.3), 1.0)
    assert first.rms == pytest.approx(0.3 / math.sqrt(6))
    assert second.largest == pytest.approx(0.02) and second.unit == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"2 action dimensions need as many names; got \['x'\]"):
        action_errors(reference, got, torch.ones(2), ["x"])


def test_a_comparison_is_json_without_infinities():
    comparison = Comparison(
        reference="float32",
        got="fp8_block",
        num_samples=4,
        chunk=ChunkAccuracy([0.9999, 0.999], [0.9998, 0.99], 0.01, [], ["torch.float32"]),
        loss=LossAccuracy(2.0, 2.5, 1.4),
        layers=[LayerAccuracy("a", (2, 2), order=1, weight_db=math.inf, output_db=-math.inf)],
    )
    record = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    assert record["chunk"]["cosine"] == 0.999 and record["chunk"]["worst_cosine"] == 0.99
    assert record["loss"]["relative_change"] == 0.25
    assert (record["layers"][0]["weight_db"], record["layers"][0]["output_db"]) == ("exact", "lost")
    assert record["layers"][0]["input_db"] is None
    assert plain_numbers([math.nan]) == ["not a number"]
    assert (
        LossAccuracy(0.0, 0.0, 1.0).relative_change == 0.0 and LossAccuracy(0.0, 1.0, 1.0).relative_change == math.inf
    )
