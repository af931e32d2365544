# SPDX-License-Identifier: Apache-2.0
"""Products of activations with a block-scaled FP8 weight: how each kernel computes them, and where it can.

Activations are either in high precision, or in e4m3 with one scale for 128 channels of a row, which is what the FP8
tensor cores of Hopper multiply with weights in blocks of 128 x 128.

Shape suffixes: M rows of activations, N outputs, K inputs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from embodix_fp8.blocks import (
    ACTIVATION_BLOCK,
    BLOCK,
    ScaledWeight,
    block_amax,
    dequantize_blocks,
    round_blocks,
)

ROW_MULTIPLE = 4  # the scales of the activations are read 16 bytes at a time
WIDTH_MULTIPLE = 16
MAX_COMPILED_SHAPES = 64
# Weights that a policy must have for compiling to pay in auto: it takes about half a minute, and saves half a second a
# forward pass for every 100 million weights (benchmarks/fp8_formats.py).
COMPILE_FROM = 100_000_000


class Kernel(Protocol):
    """One way to compute ``activations @ weight.T``."""

    name: str
    fp8_activations: bool  # whether it multiplies activations in e4m3, by what it is

    def probe(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it can't run on this device in this dtype, or None."""
        ...

    def shape_problem(self, shape: tuple[int, int]) -> str | None:
        """Why it can't multiply a weight of ``[N, K]``, or None."""
        ...

    def __call__(self, rows_MK: Tensor, weight: ScaledWeight) -> Tensor:
        """``[M, N]`` in the dtype of the rows."""
        ...


class DequantizeKernel:
    """The weight in the activations' dtype, made anew at every call, and an ordinary product."""

    name = "dequantize"
    fp8_activations = False

    def probe(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def shape_problem(self, shape: tuple[int, int]) -> str | None:
        return None

    def __call__(self, rows_MK: Tensor, weight: ScaledWeight) -> Tensor:
        return F.linear(rows_MK, self.dequantize(weight, rows_MK.dtype))

    def dequantize(self, weight: ScaledWeight, dtype: torch.dtype) -> Tensor:
        """``[N, K]``."""
        return weight.dequantize(dtype)


class CompiledDequantizeKernel(DequantizeKernel):
    """The same, with the weight made by one compiled loop; compiled once a shape."""

    name = "dequantize_compiled"

    def __init__(self) -> None:
        self._compiled: Callable[..., Tensor] = torch.compile(dequantize_blocks, dynamic=False, fullgraph=True)

    def probe(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type == "cpu" and shutil.which("g++") is None and shutil.which("clang++") is None:
            return "torch.compile needs a C++ compiler (g++ or clang++) on a CPU"
        return None

    def dequantize(self, weight: ScaledWeight, dtype: torch.dtype) -> Tensor:
        # Without a limit of its own, shapes beyond the eighth would run uncompiled with no more than a warning.
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=MAX_COMPILED_SHAPES):
            return self._compiled(weight.values, weight.scale_inv, weight.block, dtype)


class ScaledMmKernel:
    """``torch.nn.functional.scaled_mm`` with 1 x 128 scales of activations and 128 x 128 scales of weights (Hopper).

    Source of the layouts: torch/_meta_registrations.py (``_check_scaled_mm_sizes_v2``) and test/
    test_scaled_matmul_cuda.py of torch 2.10: scales of activations ``[M, K / 128]`` with M contiguous, M padded to a
    multiple of 4; scales of weights ``[L, N / 128]`` with L contiguous, L being K / 128 padded to a multiple of 4.
    """

    name = "scaled_mm"
    fp8_activations = True

    def probe(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return f"there are no FP8 tensor cores on {device.type}"
        if torch.version.hip is not None:
            return "block scaling needs CUDA; this torch is built for ROCm"
        capability = torch.cuda.get_device_capability(device)
        if capability != (9, 0):
            found = f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
            return f"1 x 128 and 128 x 128 scaling is for compute capability 9.0 (Hopper); {found}"
        built_for = tuple(int(part) for part in str(torch.version.cuda).split("."))
        if built_for < (12, 9):
            return f"cuBLAS has block scaling since CUDA 12.9; this torch is built for {torch.version.cuda}"
        if dtype not in (torch.bfloat16, torch.float32):
            return f"its products are bfloat16 or float32; got {dtype}"
        return None

    def shape_problem(self, shape: tuple[int, int]) -> str | None:
        num_outputs, num_inputs = shape
        if num_inputs % BLOCK[1] or num_outputs % WIDTH_MULTIPLE:
            return (
                f"it takes inputs in multiples of {BLOCK[1]} and outputs in multiples of {WIDTH_MULTIPLE}; got "
                f"{num_inputs} inputs and {num_outputs} outputs"
            )
        return None

    def __call__(self, rows_MK: Tensor, weight: ScaledWeight) -> Tensor:
        num_rows = rows_MK.shape[0]
        rows = quantize_rows(F.pad(rows_MK, (0, 0, 0, -num_rows % ROW_MULTIPLE)))
        recipe = F.ScalingType
        product = F.scaled_mm(
            rows.values,
            weight.values.t(),
            rows.scale_inv.t().contiguous().t(),
            recipe.BlockWise1x128,
            F.pad(weight.scale_inv, (0, -weight.scale_inv.shape[1] % ROW_MULTIPLE)).t(),
            recipe.BlockWise128x128,
            output_dtype=rows_MK.dtype,
        )
        return product[:num_rows]


class EmulatedKernel:
    """What ``scaled_mm`` computes, in float32 from the rounded operands: its reference, on any device."""

    name = "scaled_mm_emulated"
    fp8_activations = True

    def probe(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def shape_problem(self, shape: tuple[int, int]) -> str | None:
        return None

    def __call__(self, rows_MK: Tensor, weight: ScaledWeight) -> Tensor:
        rows = quantize_rows(rows_MK).dequantize(torch.float32)
        return F.linear(rows, weight.dequantize(torch.float32)).to(rows_MK.dtype)


def quantize_rows(rows_MK: Tensor, block: tuple[int, int] = ACTIVATION_BLOCK) -> ScaledWeight:
    """Activations in e4m3, by default with one scale for 128 channels of a row; what is not finite becomes NaN."""
    wide_MK = rows_MK.float()
    return round_blocks(wide_MK, block_amax(wide_MK, block), block)


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (ScaledMmKernel(), DequantizeKernel(), CompiledDequantizeKernel(), EmulatedKernel())
}
