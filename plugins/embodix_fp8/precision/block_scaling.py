# SPDX-License-Identifier: Apache-2.0
"""FP8 training with block scales: Transformer Engine's ``Float8BlockScaling`` on Hopper, emulated elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodix_fp8.blocks import BLOCK
from embodix_fp8.precision.block_rounding import BlockRoundedLinear
from embodix_fp8.precision.gemm_gate import gate_for, gate_options
from embodix_fp8.precision.installation import (
    LinearKernel,
    PrecisionInstallation,
    first_products_problem,
    install_kernel,
)
from embodix_fp8.precision.torchao_float8 import KernelChoice, emulation_reason, require_choice


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

    def install(self, policy: nn.Module, policy_type: str, device: torch.device) -> PrecisionInstallation:
        """Compute the language model's linear layers in FP8.

        Raises:
            ValueError: Transformer Engine can't run, with ``strict``, or a policy that has no float32 weights.
        """
        problem = transformer_engine_problem(device)
        if problem is None and self._kernel == "auto":
            problem = first_products_problem(TransformerEngineKernel(), device)
        fallback = emulation_reason(self._kernel, problem, self._strict)
        kernel: LinearKernel = TransformerEngineKernel() if fallback is None else EmulatedBlocks(fallback)
        gate = gate_for(kernel.name, device, self._gate) if fallback is None else None
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
