# SPDX-License-Identifier: Apache-2.0
"""FP8 training with block scales: Transformer Engine's ``Float8BlockScaling`` on Hopper, emulated elsewhere.

Emulated, every operand is rounded to e4m3 and products are in float32. The operands of each of the three products are
scaled along the dimension that is summed over, as DeepSeek-V3 (arXiv:2412.19437, section 3.3) and Transformer Engine
do: 1 x 128 for activations and gradients, 128 x 128 for weights. What a product needs in the other direction is rounded
from the unrounded values. Rounding itself has gradient one (straight-through).

Shape suffixes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from embodix_fp8.blocks import ACTIVATION_BLOCK, BLOCK, block_amax, round_blocks
from embodix_fp8.precision.gemm_gate import gate_for, gate_options
from embodix_fp8.precision.linear_layers import (
    Fp8Layers,
    LinearKernel,
    first_products_problem,
    install_kernel,
)
from embodix_fp8.precision.torchao_float8 import KernelChoice, emulation_reason, require_choice

COLUMN_BLOCK = ACTIVATION_BLOCK[::-1]


def transformer_engine_problem(device: torch.device) -> str | None:
    """Why Transformer Engine can't train with block scales here, or None; the reason is its own where it has one."""
    if device.type != "cuda":
        return f"Transformer Engine needs a CUDA device; this run is on {device.type}"
    try:
        import transformer_engine.pytorch as te

        with torch.cuda.device(device):
            available, reason = te.is_fp8_block_scaling_available(return_reason=True)
    except Exception as error:  # without its CUDA libraries the import raises RuntimeError
        return f"Transformer Engine can't be used ({type(error).__name__}: {error}); install embodix[te]"
    return None if available else f"Transformer Engine: {reason}"


class BlockScaledFp8:
    """The registered precision ``block``: e4m3 everywhere, 1 x 128 activations and gradients, 128 x 128 weights.

    Args:
        kernel: ``auto`` takes Transformer Engine, and emulates where it can't run; ``emulated`` always emulates.
        strict: emulating where ``auto`` was asked for is an error.
        gemm_gate: ``enabled``, ``threshold`` and ``table`` of its gate.

    Raises:
        ValueError: an unknown kernel or option of the gate.
    """

    def __init__(
        self, *, kernel: KernelChoice = "auto", strict: bool = False, gemm_gate: Mapping[str, Any] | None = None
    ) -> None:
        require_choice("kernel", kernel, get_args(KernelChoice))
        self._kernel, self._strict, self._gate = kernel, strict, gate_options(gemm_gate)

    probe = staticmethod(transformer_engine_problem)

    @staticmethod
    def needs() -> str | None:
        """Nothing: without Transformer Engine it is emulated."""
        return None

    def install(
        self, policy: nn.Module, policy_type: str, device: torch.device, *, gemm_table: Path | None = None
    ) -> Fp8Layers:
        """Compute the language model's linear layers in FP8.

        Raises:
            ValueError: Transformer Engine can't run, with ``strict``, or a policy that has no float32 weights.
        """
        problem = transformer_engine_problem(device)
        if problem is None and self._kernel == "auto":
            problem = first_products_problem(TransformerEngineKernel(), device)
        fallback = emulation_reason(self._kernel, problem, self._strict)
        kernel: LinearKernel = TransformerEngineKernel() if fallback is None else EmulatedBlocks(fallback)
        gate = gate_for(kernel.name, device, self._gate, gemm_table) if fallback is None else None
        return install_kernel(policy, policy_type, kernel, gate)


class EmulatedBlocks:
    """Makes :class:`BlockRoundedLinear` layers; see :class:`LinearKernel`."""

    recipe = "float8 blocks"

    def __init__(self, fallback: str) -> None:
        self.name, self.fallback = "blocks, emulated", fallback

    def shape_problem(self, shape: tuple[int, int]) -> str | None:
        return None

    def convert(self, layer: nn.Linear) -> nn.Module:
        return BlockRoundedLinear.of(layer)


class TransformerEngineKernel:
    """Makes ``te.Linear`` layers; see :class:`LinearKernel`. Written against Transformer Engine 2.8 and later."""

    recipe, fallback = "float8 blocks", None
    name = "blocks, transformer_engine Float8BlockScaling"

    def shape_problem(self, shape: tuple[int, int]) -> str | None:
        if any(size % BLOCK[0] for size in shape):
            return f"Transformer Engine scales whole blocks of {BLOCK[0]}; got {shape[1]} inputs and {shape[0]} outputs"
        return None

    def convert(self, layer: nn.Linear) -> nn.Module:
        sizes, has_bias = (layer.in_features, layer.out_features), layer.bias is not None
        converted: nn.Module = _layer_class()(*sizes, bias=has_bias, params_dtype=layer.weight.dtype, device="meta")
        converted.weight = layer.weight
        if has_bias:
            converted.bias = layer.bias
        return converted


@functools.cache
def _layer_class() -> Any:
    """Transformer Engine's layer, made when it is first needed."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling

    recipe = Float8BlockScaling()

    class BlockScaledLinear(te.Linear):  # type: ignore[misc]  # Transformer Engine has no types
        """Takes any number of rows, and leaves no entry of its own in checkpoints."""

        # Its extra state would become a key that upstream's checkpoints don't have; this recipe keeps no state.
        get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state

        def forward(self, input: Tensor) -> Tensor:
            rows_MK = input.flatten(0, -2)
            # Rows of zeros give rows of zeros, and add nothing to the weight's gradient.
            padded_MK = F.pad(rows_MK, (0, 0, 0, -len(rows_MK) % BLOCK[0]))
            with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                output_MN: Tensor = super().forward(padded_MK)
            return output_MN[: len(rows_MK)].view(*input.shape[:-1], -1)

    return BlockScaledLinear


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
