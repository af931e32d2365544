# SPDX-License-Identifier: Apache-2.0
"""Block-scaled e4m3: error bounds, edges, zeros and ranges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodix.testing.errors import relative_error
from embodix_fp8 import blocks
from embodix_fp8.blocks import BLOCK, E4M3_MAX, FLOAT8, ScaledWeight, quantize_blocks, scale_shape

SIZES = st.integers(1, 300)
BLOCKS = st.sampled_from([BLOCK, (1, 128), (1, 10_000), (10_000, 10_000), (32, 16), (1, 1)])


def weights(rows: int, columns: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, BLOCKS, st.integers(0, 10**6), st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30]))
def test_ordinary_weights_keep_three_percent(rows, columns, block, seed, scale):
    weight = weights(rows, columns, seed, scale)
    scaled = quantize_blocks(weight, block)
    assert scaled.scale_inv.shape == scale_shape((rows, columns), block)
    if rows * columns >= 64:
        assert relative_error(scaled.dequantize(torch.float32), weight) <= 0.03
    # Half a step of 3 mantissa bits, or half of the smallest step of a block.
    bound = weight.abs() * 2**-4 + torch.full_like(weight, 2**-10) * float(weight.abs().max()) / E4M3_MAX
    assert bool(((scaled.dequantize(torch.float32) - weight).abs() <= bound * (1 + 1e-5)).all())


@settings(max_examples=40, deadline=None)
@given(SIZES, SIZES, BLOCKS, st.integers(0, 10**6), st.sampled_from([torch.float32, torch.bfloat16]))
def test_quantizing_dequantized_weights_returns_the_same_values(rows, columns, block, seed, dtype):
    scaled = quantize_blocks(weights(rows, columns, seed), block)
    again = quantize_blocks(scaled.dequantize(dtype), block)
    assert torch.equal(again.values.view(torch.uint8), scaled.values.view(torch.uint8))
    torch.testing.assert_close(
        again.scale_inv, scaled.scale_inv, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=0
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(129, 300), st.integers(129, 300), st.integers(0, 10**6), st.sampled_from([1e5, 3e5, 1e6]))
def test_blocks_confine_what_one_outlier_does(rows, columns, seed, outlier):
    """Four times better than one scale a tensor on all other weights, once the range of e4m3 is used up."""
    weight = weights(rows, columns, seed)
    weight[0, 0] = outlier
    others = torch.ones_like(weight, dtype=torch.bool)
    others[:128, :128] = False
    errors = {}
    for name, block in (("tensor", (rows, columns)), ("block", BLOCK)):
        errors[name] = relative_error(quantize_blocks(weight, block).dequantize(torch.float32)[others], weight[others])
    assert errors["block"] <= 0.03
    assert errors["tensor"] >= 4 * errors["block"]


def test_a_blocks_scale_is_its_own_largest_magnitude():
    """The mutation twin of the edges: neighbours and padding must not leak into a block."""
    weight = torch.full((130, 129), 2.0)
    weight[128:, :128] = -3.0
    weight[:128, 128:] = 5.0
    weight[128:, 128:] = 7.0
    scaled = quantize_blocks(weight)
    torch.testing.assert_close(scaled.scale_inv, torch.tensor([[2.0, 5.0], [3.0, 7.0]]) / E4M3_MAX)
    assert torch.equal(scaled.dequantize(torch.float32), weight)


@pytest.mark.parametrize("block", [BLOCK, (1, 128), (1000, 1000)])
def test_large_weights_are_quantized_in_parts(block, monkeypatch):
    weight = weights(700, 130, seed=4)
    whole = quantize_blocks(weight, block)
    monkeypatch.setattr(blocks, "NUM_WEIGHTS_AT_A_TIME", 130 * 200)
    parts = quantize_blocks(weight.t().contiguous().t(), block)
    assert torch.equal(parts.values.view(torch.uint8), whole.values.view(torch.uint8))
    assert torch.equal(parts.scale_inv, whole.scale_inv)


def test_blocks_of_zeros_have_scale_one():
    weight = torch.zeros(200, 130)
    weight[0, 129] = 1.0
    scaled = quantize_blocks(weight)
    assert scaled.scale_inv.tolist() == [[1.0, pytest.approx(1 / E4M3_MAX)], [1.0, 1.0]]
    assert torch.equal(scaled.dequantize(torch.float32), weight)


@pytest.mark.parametrize("magnitude", [1e-38, 1e-42, 3e38])
def test_the_ends_of_the_range_stay_finite(magnitude):
    weight = torch.tensor([[magnitude, -magnitude / 3, 0.0]])
    got = quantize_blocks(weight).dequantize(torch.float32)
    assert bool(torch.isfinite(got).all())
    assert bool(((got - weight).abs() <= 0.07 * weight.abs() + 1e-38 / E4M3_MAX).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(value):
    weight = torch.ones(3, 4)
    weight[1, 2] = value
    with pytest.raises(ValueError, match="finite"):
        quantize_blocks(weight)


def test_shapes_and_dtypes_are_checked():
    with pytest.raises(ValueError, match="matrices of floating point"):
        quantize_blocks(torch.ones(3))
    with pytest.raises(ValueError, match="matrices of floating point"):
        quantize_blocks(torch.ones(3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="at least 1 row"):
        quantize_blocks(torch.ones(3, 3), (0, 128))
    scaled = quantize_blocks(torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"scales of shape \(1, 1\); got \(3, 1\)"):
        ScaledWeight(scaled.values, torch.ones(3, 1), BLOCK)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        ScaledWeight(scaled.values.float(), scaled.scale_inv, BLOCK)


def test_shapes_and_bytes_on_the_meta_device():
    scaled = quantize_blocks(torch.empty(2048, 16384, device="meta", dtype=torch.bfloat16))
    assert (scaled.values.dtype, tuple(scaled.scale_inv.shape)) == (FLOAT8, (16, 128))
    assert scaled.num_bytes == 2048 * 16384 + 4 * 16 * 128
