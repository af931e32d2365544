# SPDX-License-Identifier: Apache-2.0
"""The table of FP8 formats says the same as their definitions: where blocks matter, and where they do not."""

from __future__ import annotations

import pytest
import torch

from embodix_fp8.side_by_side import FORMATS, blocks_matter, compare_formats, quantize_in, weights_of_range

SIZE = 1024
ROWS = torch.randn(32, SIZE, generator=torch.Generator().manual_seed(3))


def errors(amax_over_sigma, pattern):
    weight, outliers = weights_of_range((SIZE, SIZE), amax_over_sigma, pattern)
    return compare_formats(weight, ROWS, outliers)


@pytest.mark.parametrize("pattern", ["none", "one weight", "one column"])
@pytest.mark.parametrize("amax_over_sigma", [5, 1e3, 1e4])
def test_at_ordinary_ranges_all_formats_are_the_same(pattern, amax_over_sigma):
    found = errors(amax_over_sigma, pattern)
    assert [error.format for error in found] == list(FORMATS)
    assert all(0.02 < error.weight_error <= 0.03 for error in found)
    assert all(30 < error.weight_sqnr_db < 33 for error in found)
    assert all(0.02 < error.product_error <= 0.03 < error.product_error_fp8 < 0.05 for error in found)
    assert not blocks_matter(found)


@pytest.mark.parametrize("amax_over_sigma", [1e5, 1e6])
def test_beyond_the_range_of_e4m3_blocks_keep_what_one_scale_loses(amax_over_sigma):
    tensor, row, block = errors(amax_over_sigma, "one weight")
    assert blocks_matter([tensor, row, block])
    assert tensor.weight_error >= 4 * block.weight_error
    assert tensor.zeroed > 10 * block.zeroed
    tensor, row, block = errors(amax_over_sigma, "one column")
    assert row.weight_error == pytest.approx(tensor.weight_error, rel=1e-3)
    assert tensor.weight_error > 2 * block.weight_error


def test_bytes_hold_values_and_scales():
    weight = torch.randn(SIZE, SIZE)
    bytes_a_weight = {error.format: error.bytes_a_weight for error in compare_formats(weight, ROWS)}
    assert bytes_a_weight == {
        "per-tensor": 1 + 4 / SIZE**2,
        "per-row": 1 + 4 / SIZE,
        "128x128": 1 + 4 / 128**2,
    }
    assert quantize_in(weight, "per-row").scale_inv.shape == (SIZE, 1)
