# SPDX-License-Identifier: Apache-2.0
"""The counter sees matrix products and the CPU kernel of attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from embodix.training.flops import flop_counter


def test_attention_on_the_cpu_is_counted_forward_and_backward() -> None:
    batch, heads, length, head_dim = 2, 4, 16, 8
    q, k, v = (torch.randn(batch, heads, length, head_dim, requires_grad=True) for _ in range(3))
    with flop_counter() as counter:
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    product = 2 * batch * heads * length * length * head_dim
    assert counter.get_total_flops() == 2 * product + 4 * product


def test_grouped_heads_count_their_queries() -> None:
    q, k = torch.randn(1, 8, 5, 4), torch.randn(1, 1, 7, 4)
    with flop_counter() as counter:
        F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    assert counter.get_total_flops() == 2 * 2 * 8 * 5 * 7 * 4


def test_accumulation_in_place_is_counted() -> None:
    total, left, right = torch.zeros(3, 5), torch.randn(3, 4), torch.randn(4, 5)
    with flop_counter() as counter:
        total.addmm_(left, right)
    assert counter.get_total_flops() == 2 * 3 * 4 * 5


def test_linear_layers_are_counted() -> None:
    linear, x = torch.nn.Linear(8, 4), torch.randn(3, 8)
    with flop_counter() as counter:
        linear(x)
    assert counter.get_total_flops() == 2 * 3 * 8 * 4
