# SPDX-License-Identifier: Apache-2.0
"""FP8 training by torchao's ``Float8Linear``: one scale a tensor or a row, for activations, weights and gradients.

Its products run in FP8 units from compute capability 8.9 on; elsewhere torchao emulates them: the same rounding, then
a product in float32. Recipes (torchao 0.15, ``torchao/float8/config.py``):

- ``tensorwise``: one scale a tensor, gradients in e5m2, everything else in e4m3;
- ``rowwise``: one scale a row of either operand, a power of two, all in e4m3;
- ``rowwise_with_gw_hp``: the same, but the gradient of the weight is computed in high precision.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from embodix_fp8.precision.gemm_gate import gate_for, gate_options
from embodix_fp8.precision.linear_layers import Fp8Layers, first_products_problem, install_kernel

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
KernelChoice = Literal["auto", "emulated"]
FP8_UNITS_SINCE = (8, 9)
# ``torch._scaled_mm`` multiplies matrices whose width, and that of the second one's rows, are multiples of this.
MULTIPLE = 16


def torchao_problem() -> str | None:
    """Why torchao's float8 training can't be imported, or None."""
    try:
        import torchao.float8  # noqa: F401
    except Exception as error:  # a version that does not fit torch fails in its own ways
        return f"torchao can't be imported ({type(error).__name__}: {error}); install embodix[fp8]"
    return None


def fp8_units_problem(device: torch.device) -> str | None:
    """Why a device has no units that multiply FP8, or None."""
    if device.type != "cuda":
        return f"FP8 products need a CUDA device of compute capability 8.9 or more; this run is on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability >= FP8_UNITS_SINCE:
        return None
    return f"FP8 products need compute capability 8.9 or more; this GPU has {'.'.join(map(str, capability))}"


class TorchaoFloat8:
    """The registered precision ``torchao``.

    Args:
        recipe: what shares a scale; see the module's text.
        kernel: ``auto`` takes the device's FP8 units, and emulates where there are none; ``emulated`` always emulates.
        strict: emulating where ``auto`` was asked for is an error.
        compile: have torch.compile fuse the casts with their neighbours, without which FP8 seldom pays; None for where
            the products are not emulated.
        gemm_gate: ``enabled``, ``threshold`` and ``table`` of its gate.

    Raises:
        ValueError: an unknown recipe, kernel or option of the gate.
    """

    def __init__(
        self,
        *,
        recipe: Recipe = "rowwise",
        kernel: KernelChoice = "auto",
        strict: bool = False,
        compile: bool | None = None,
        gemm_gate: Mapping[str, Any] | None = None,
    ) -> None:
        require_choice("recipe", recipe, get_args(Recipe))
        require_choice("kernel", kernel, get_args(KernelChoice))
        self._recipe, self._kernel, self._strict, self._compile = recipe, kernel, strict, compile
        self._gate = gate_options(gemm_gate)

    needs = staticmethod(torchao_problem)
    probe = staticmethod(fp8_units_problem)

    def install(
        self, policy: nn.Module, policy_type: str, device: torch.device, *, gemm_table: Path | None = None
    ) -> Fp8Layers:
        """Compute the language model's linear layers in FP8.

        Raises:
            ValueError: torchao is missing, FP8 units are with ``strict``, or a policy that has no float32 weights.
        """
        missing = torchao_problem()
        if missing:
            raise ValueError(f"precision by torchao: {missing}, or set precision=none.")
        problem = fp8_units_problem(device)
        if problem is None and self._kernel == "auto":
            problem = first_products_problem(TorchaoKernel(self._recipe, None, compiled=False), device)
        fallback = emulation_reason(self._kernel, problem, self._strict)
        compiled = fallback is None if self._compile is None else self._compile
        kernel = TorchaoKernel(self._recipe, fallback, compiled)
        gate = gate_for(kernel.name, device, self._gate, gemm_table) if fallback is None else None
        return install_kernel(policy, policy_type, kernel, gate)


def require_choice(option: str, value: str, known: tuple[str, ...]) -> None:
    """
    Raises:
        ValueError: a value that is not among the known ones.
    """
    if value not in known:
        raise ValueError(f"{option} is one of {', '.join(known)}; got {value!r}.")


def emulation_reason(kernel: str, problem: str | None, strict: bool) -> str | None:
    """Why the products are emulated, with the price; None where they are not. What nobody asked for is announced.

    Raises:
        ValueError: the device's FP8 units were asked for, with ``strict``, and can't be used.
    """
    if kernel == "auto" and problem is None:
        return None
    if kernel == "auto" and strict:
        raise ValueError(f"strict=true refuses to emulate FP8: {problem}. Set strict=false or precision=none.")
    reason = problem if kernel == "auto" and problem else "kernel=emulated"
    fallback = f"FP8 is emulated ({reason}): the rounding of FP8, slower than without it, no memory saved"
    if kernel == "auto":
        _announce(fallback)
    return fallback


@functools.cache
def _announce(fallback: str) -> None:
    """Once a process, however many policies are trained in it."""
    logging.warning("precision: %s", fallback)


class TorchaoKernel:
    """Makes layers of torchao's; see :class:`LinearKernel`."""

    def __init__(self, recipe: Recipe, fallback: str | None, compiled: bool) -> None:
        from torchao.float8 import Float8LinearConfig

        config = Float8LinearConfig.from_recipe_name(recipe)
        # A packed batch has any number of rows, over which the weight's gradient sums: zeros fill it up.
        self._config = dataclasses.replace(config, emulate=fallback is not None, pad_inner_dim=True)
        self._compiled = compiled
        self.recipe, self.fallback = f"float8 {recipe}", fallback
        self.name = f"torchao {recipe}, {'emulated' if fallback else 'torch._scaled_mm'}"
        self.name += ", compiled" if compiled else ""

    def shape_problem(self, shape: tuple[int, int]) -> str | None:
        if any(size % MULTIPLE for size in shape):
            return f"FP8 products take multiples of {MULTIPLE} inputs and outputs; got {shape[1]} and {shape[0]}"
        return None

    def convert(self, layer: nn.Linear) -> nn.Module:
        converted: nn.Module = _layer_class().from_float(layer, config=self._config)
        if self._compiled:
            converted.compile(dynamic=True)
        return converted


@functools.cache
def _layer_class() -> Any:
    """torchao's layer, made when it is first needed; one class, since torch compiles each anew."""
    from torchao.float8.float8_linear import Float8Linear

    class AutocastFloat8Linear(Float8Linear):  # type: ignore[misc]  # torchao has no types
        """Honours the autocast of every device; torchao's layer that of a GPU only."""

        def forward(self, input: Tensor) -> Tensor:
            if torch.is_autocast_enabled(input.device.type):
                input = input.to(torch.get_autocast_dtype(input.device.type))
            output: Tensor = super().forward(input)
            return output

    return AutocastFloat8Linear
