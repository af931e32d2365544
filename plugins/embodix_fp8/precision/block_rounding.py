# SPDX-License-Identifier: Apache-2.0
"""The linear layer of block-scaled FP8 training, emulated: every operand rounded to e4m3, products in float32.

The operands of each of the three products are scaled along the dimension that is summed over, as DeepSeek-V3 (arXiv:
2412.19437, section 3.3) and Transformer Engine's ``Float8BlockScaling`` do: 1 x 128 for activations and gradients,
128 x 128 for weights. What a product needs in the other direction is rounded from the unrounded values. Rounding
itself has gradient one (straight-through).

Shape suffixes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from embodix_fp8.blocks import ACTIVATION_BLOCK, BLOCK, block_amax, round_blocks

COLUMN_BLOCK = ACTIVATION_BLOCK[::-1]


def rounded(values: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 of the same shape, holding what FP8 with one scale a block can; NaN where a block is not finite."""
    wide = values.float()
    return round_blocks(wide, block_amax(wide, block), block).dequantize(torch.float32)


class BlockRoundedProduct(torch.autograd.Function):
    """``x_MK @ weight_NK.T`` with e4m3 operands, in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        with torch.autocast(x_MK.device.type, enabled=False):
            return (rounded(x_MK, ACTIVATION_BLOCK) @ rounded(weight_NK, BLOCK).t()).to(x_MK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_MN: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_MK, weight_NK = ctx.saved_tensors
        grad_MK = grad_NK = None
        with torch.autocast(slope_MN.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                grad_MK = (rounded(slope_MN, ACTIVATION_BLOCK) @ rounded(weight_NK, BLOCK)).to(x_MK.dtype)
            if ctx.needs_input_grad[1]:
                columns_NM = rounded(slope_MN, COLUMN_BLOCK).t()
                grad_NK = (columns_NM @ rounded(x_MK, COLUMN_BLOCK)).to(weight_NK.dtype)
        return grad_MK, grad_NK


class BlockRoundedLinear(nn.Linear):
    """A linear layer that computes as block-scaled FP8 would, with the parameters of another."""

    @classmethod
    def of(cls, layer: nn.Linear) -> BlockRoundedLinear:
        """The twin that shares the layer's Parameter objects."""
        twin = cls(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        twin.weight, twin.bias = layer.weight, layer.bias
        return twin

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        rows_MN: Tensor = BlockRoundedProduct.apply(input.flatten(0, -2), self.weight)
        output = rows_MN.view(*input.shape[:-1], -1)
        return output if self.bias is None else output + self.bias.to(output.dtype)
