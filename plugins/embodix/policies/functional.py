# SPDX-License-Identifier: Apache-2.0
"""Autograd functions that the fast paths share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ZeroGradient(torch.autograd.Function):
    """``apply(value, *unused)`` is ``value``; the unused tensors get gradients of exact zeros instead of None."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *unused: Tensor) -> Tensor:
        ctx.unused = [(tensor.shape, tensor.dtype, tensor.device) for tensor in unused]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if need else None
            for need, (shape, dtype, device) in zip(needed, ctx.unused, strict=True)
        ]
        return gradient, *zeros
