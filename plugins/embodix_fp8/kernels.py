# SPDX-License-Identifier: Apache-2.0
"""Products of activations with a block-scaled FP8 weight: how each kernel computes them, where it can, and which does.

The named kernel multiplies a weight, or the first that can run and computes the right numbers. A fallback is any
product that FP8 tensor cores were meant for and do not compute.

Activations are either in high precision, or in e4m3 with one scale for 128 channels of a row, which is what the FP8
tensor cores of Hopper multiply with weights in blocks of 128 x 128.

Shape suffixes: M rows of activations, N outputs, K inputs.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from embodix_fp8.blocks import (
    ACTIVATION_BLOCK,
    BLOCK,
    ScaledWeight,
    block_amax,
    dequantize_blocks,
    quantize_blocks,
    round_blocks,
)

Activations = Literal["auto", "high", "fp8"]
KernelName = Literal["auto", "scaled_mm", "dequantize", "dequantize_compiled", "dequantize_at_load"]

AT_LOAD = "dequantize_at_load"
# Largest relative error (Frobenius norm) that the self-check lets pass. FP8 tensor cores add up in fewer bits than
# float32 has.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
FP8_TOLERANCE = 2e-2
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


@dataclass(frozen=True)
class KernelChoice:
    """What a policy's products are computed by.

    Attributes:
        kernel: for the weights that it takes; None where the weights are dequantized at load.
        otherwise: for those whose shape it does not take.
        fallback: why FP8 tensor cores do not compute what they were meant for, None where they do or were not.
    """

    kernel: Kernel | None
    otherwise: Kernel
    fallback: str | None = None

    def of(self, shape: tuple[int, int]) -> tuple[Kernel | None, str | None]:
        """The kernel of a weight of ``[N, K]``, and why it is a fallback."""
        problem = self.kernel.shape_problem(shape) if self.kernel is not None else None
        return (self.kernel, self.fallback) if problem is None else (self.otherwise, problem)


def require_options(activations: str, kernel: str) -> None:
    """
    Raises:
        ValueError: unknown names, or two that exclude each other.
    """
    for option, name, known in (
        ("activations", activations, get_args(Activations)),
        ("kernel", kernel, get_args(KernelName)),
    ):
        if name not in known:
            raise ValueError(f"quantization.options.{option} is one of {', '.join(known)}; got {name!r}.")
    if activations == "high" and kernel == "scaled_mm":
        raise ValueError(
            "kernel=scaled_mm multiplies activations in FP8; got activations=high. Choose activations=auto, or another "
            "kernel."
        )
    if activations == "fp8" and kernel in ("dequantize_compiled", AT_LOAD):
        raise ValueError(
            f"kernel={kernel} multiplies activations in high precision; got activations=fp8. Choose kernel=auto, which "
            "emulates FP8 activations where no tensor cores multiply them."
        )


def choose_kernel(
    activations: str, kernel: str, device: torch.device, dtype: torch.dtype, num_weights: int
) -> KernelChoice:
    """Resolve the options on a device.

    Args:
        num_weights: how many the policy has in FP8: compiling pays for many only.

    Raises:
        ValueError: the named kernel can't run here; the message has the reason and those that can.
    """
    require_options(activations, kernel)
    otherwise = KERNELS["scaled_mm_emulated" if activations == "fp8" else "dequantize"]
    if kernel == AT_LOAD:
        return KernelChoice(None, otherwise)
    if kernel == "auto":
        return _best(activations, device, dtype, num_weights, otherwise)
    named = otherwise if kernel == "dequantize" else KERNELS[kernel]
    reason = kernel_problem(named.name, device, dtype)
    if reason is not None:
        others = [name for name in get_args(KernelName) if name in KERNELS]
        usable = [name for name in others if KERNELS[name].probe(device, dtype) is None]
        raise ValueError(
            f"kernel={kernel} can't run on {device.type} in {dtype}: {reason}. Usable here: {', '.join(usable)}, "
            f"{AT_LOAD} (or kernel=auto)."
        )
    return KernelChoice(named, otherwise)


def _best(
    activations: str, device: torch.device, dtype: torch.dtype, num_weights: int, otherwise: Kernel
) -> KernelChoice:
    fallback = None
    if activations != "high":
        fallback = kernel_problem("scaled_mm", device, dtype)
        if fallback is None:
            return KernelChoice(KERNELS["scaled_mm"], otherwise)
    pays = activations != "fp8" and num_weights >= COMPILE_FROM
    if pays and kernel_problem("dequantize_compiled", device, dtype) is None:
        return KernelChoice(KERNELS["dequantize_compiled"], otherwise, fallback)
    return KernelChoice(otherwise, otherwise, fallback)


@functools.cache
def kernel_problem(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a kernel can't be used (its probe's reason, or a self-check that disagrees), or None."""
    kernel = KERNELS[name]
    reason = kernel.probe(device, dtype)
    if reason or device.type == "meta":
        return reason
    try:
        error = self_check_error(kernel, device, dtype)
    except Exception as failure:
        # A kernel that probes well may still refuse this machine; what it says becomes the reason.
        return f"its first call failed: {type(failure).__name__}: {failure}"
    tolerance = FP8_TOLERANCE if kernel.fp8_activations else TOLERANCE[dtype]
    if not error <= tolerance:
        return f"its self-check is off by {error:.2g} (relative), more than {tolerance:.0e}"
    return None


@torch.no_grad()
def self_check_error(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> float:
    """Relative error of a product of 21 rows with a weight of 384 x 256, against float32.

    Blocks and rows differ in magnitude, so that a scale in the wrong place shows.
    """
    generator = torch.Generator().manual_seed(0)
    rows_MK = torch.randn(21, 256, generator=generator) * torch.logspace(-2, 2, 21)[:, None]
    weight_NK = torch.randn(384, 256, generator=generator) * torch.logspace(-3, 3, 384)[:, None]
    weight_NK[:, 128:] *= 7
    rows_MK, weight = rows_MK.to(device, dtype), quantize_blocks(weight_NK.to(device))
    reference = KERNELS["scaled_mm_emulated" if kernel.fp8_activations else "dequantize"]
    return _worst_row_and_column(kernel(rows_MK, weight).float(), reference(rows_MK.float(), weight))


def _worst_row_and_column(got_MN: Tensor, wanted_MN: Tensor) -> float:
    """The largest relative error of a row or a column, so that large ones hide nothing."""
    difference = got_MN - wanted_MN
    return max(float((difference.norm(dim=dim) / wanted_MN.norm(dim=dim)).max()) for dim in (0, 1))
