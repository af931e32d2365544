# SPDX-License-Identifier: Apache-2.0
"""Packers keep the order of tokens, their positions, and nothing but tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodix.packing.layout import PaddedPacker, PaddingFreePacker

MASK = torch.tensor([[True, False, True, True], [False, False, True, False]])


def test_padding_free_keeps_valid_rows_in_order():
    layout = PaddingFreePacker().layout(MASK)
    assert layout.rows_N.tolist() == [0, 2, 3, 6]
    assert layout.positions_N.tolist() == [0, 1, 2, 0]
    assert layout.lengths == (3, 1)
    assert layout.valid_rows_V is None
    assert (layout.num_valid, layout.num_computed) == (4, 4)


def test_padded_keeps_every_row_and_says_which_are_tokens():
    layout = PaddedPacker().layout(MASK)
    assert layout.rows_N.tolist() == list(range(8))
    assert layout.valid_rows_V.tolist() == [0, 2, 3, 6]
    assert (layout.num_valid, layout.num_computed) == (4, 8)


@pytest.mark.parametrize("packer", [PaddedPacker(), PaddingFreePacker()])
def test_a_batch_without_padding_needs_no_selection(packer):
    layout = packer.layout(torch.ones(2, 3, dtype=torch.bool))
    assert layout.rows_N.tolist() == list(range(6))
    assert layout.valid_rows_V is None


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 10_000))
def test_both_packers_agree_on_the_tokens(batch_size, length, seed):
    mask = torch.rand(batch_size, length, generator=torch.Generator().manual_seed(seed)) < 0.6
    padded, packed = PaddedPacker().layout(mask), PaddingFreePacker().layout(mask)
    chosen = slice(None) if padded.valid_rows_V is None else padded.valid_rows_V
    assert padded.lengths == packed.lengths
    assert torch.equal(padded.rows_N[chosen], packed.rows_N)
    assert torch.equal(padded.positions_N[chosen], packed.positions_N)
    expected = [position for count in packed.lengths for position in range(count)]
    assert packed.positions_N.tolist() == expected


@pytest.mark.parametrize("mask", [torch.ones(2, 3), torch.ones(4, dtype=torch.bool)])
def test_anything_but_a_token_mask_is_refused(mask):
    with pytest.raises(ValueError, match="bool mask"):
        PaddingFreePacker().layout(mask)


def test_the_layout_moves_with_its_indices():
    layout = PaddedPacker().layout(MASK).to(torch.device("meta"))
    assert layout.rows_N.device.type == layout.valid_rows_V.device.type == "meta"
    assert layout.lengths == (3, 1)
