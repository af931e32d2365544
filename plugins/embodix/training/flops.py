# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a step by torch's counter, with what it does not know added.

torch counts no SDPA kernel of the CPU, refuses grouped heads, and passes over the in-place ``addmm_``. Attention is
counted as the products it stands for: two forward, four backward, whatever a kernel recomputes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def flop_counter() -> FlopCounterMode:
    """A context manager whose ``get_total_flops()`` counts matrix products, convolutions and attention."""
    aten = torch.ops.aten
    counter = FlopCounterMode(
        display=False,
        custom_mapping={
            aten._scaled_dot_product_flash_attention_for_cpu: _attention_products(2),
            aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_products(4),
            aten.addmm_: _accumulated_product,
        },
    )
    counter.mod_tracker = _WholeModel()  # type: ignore[assignment]
    return counter


class _WholeModel(AbstractContextManager["_WholeModel", None]):
    """In the place of torch's tracker of modules, whose hooks cost as much as the counting and keep tensors alive."""

    parents = frozenset({"Global"})

    def __exit__(self, *error: object) -> None:
        return None


def _attention_products(num_products: int) -> Callable[..., int]:
    """Counts of a kernel called with (query, key, value, ...), or (grad, query, key, value, ...) backward."""
    first = num_products // 2 - 1

    def count(*arguments: Any, out_shape: Any = None, **options: Any) -> int:
        query, key = arguments[first : first + 2]
        batch, heads, queries, head_dim = query
        return int(num_products * 2 * batch * heads * queries * key[2] * head_dim)

    return count


def _accumulated_product(total: Any, left: Any, right: Any, *, out_shape: Any = None, **options: Any) -> int:
    return int(2 * left[0] * left[1] * right[1])
