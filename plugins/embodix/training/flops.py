# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a step, by torch's counter, with the CPU kernel of SDPA that it does not know."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def _cpu_sdpa_flop(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _cpu_sdpa_backward_flop(
    grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


def flop_counter() -> FlopCounterMode:
    """A context manager whose ``get_total_flops()`` counts matrix products, convolutions and attention."""
    aten = torch.ops.aten
    return FlopCounterMode(
        display=False,
        custom_mapping={
            aten._scaled_dot_product_flash_attention_for_cpu: _cpu_sdpa_flop,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_sdpa_backward_flop,
        },
    )
