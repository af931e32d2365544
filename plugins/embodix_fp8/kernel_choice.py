# SPDX-License-Identifier: Apache-2.0
"""Which kernel multiplies a weight: the named one, or the first that can run and computes the right numbers.

A fallback is any product that FP8 tensor cores were meant for and do not compute.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from embodix_fp8.blocks import quantize_blocks
from embodix_fp8.kernels import COMPILE_FROM, KERNELS, Kernel

Activations = Literal["auto", "high", "fp8"]
KernelName = Literal["auto", "scaled_mm", "dequantize", "dequantize_compiled", "dequantize_at_load"]

AT_LOAD = "dequantize_at_load"
# Largest relative error (Frobenius norm) that the self-check lets pass. FP8 tensor cores add up in fewer bits than
# float32 has.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
FP8_TOLERANCE = 2e-2


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
