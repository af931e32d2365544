# SPDX-License-Identifier: Apache-2.0
"""Put FP8 linear layers in the places of a policy's own, with the same Parameter objects under the same names.

Because the parameters stay, so do the optimizer that upstream has already made, its state and the checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from embodix.quantization.selection import ModuleChoice, choose_modules
from embodix_fp8.format_words import TRAINING_FORMAT
from embodix_fp8.precision.gemm_gate import GemmGate, GemmTable

# Largest relative error (Frobenius norm) that first products may have; two operands of e4m3 and e5m2 cost 0.06.
TOLERANCE = 0.15


class LinearKernel(Protocol):
    """How one linear layer is computed."""

    @property
    def name(self) -> str:
        """For reports and for the table of timings."""
        ...

    @property
    def recipe(self) -> str:
        """What is scaled how."""
        ...

    @property
    def fallback(self) -> str | None:
        """Why this is not the kernel of the device's FP8 units, with the price; None where it is."""
        ...

    def shape_problem(self, shape: tuple[int, int]) -> str | None:
        """Why a layer with these outputs and inputs can't be computed, or None."""
        ...

    def convert(self, layer: nn.Linear) -> nn.Module:
        """A module that computes the layer with the layer's own parameters."""
        ...


@dataclass
class Place:
    """Where a layer stands in the policy, and what may stand there.

    Attributes:
        path: full module path.
        original: the policy's own layer.
        fp8: its FP8 twin, which holds the same parameters.
        decision: why the one or the other stands there.
        kept: whether FP8 is; None until that is decided.
    """

    path: str
    parent: nn.Module
    name: str
    original: nn.Linear
    fp8: nn.Module
    decision: str
    kept: bool | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.original.out_features, self.original.in_features

    def put(self, module: nn.Module) -> None:
        """Let this module stand in the place, in the mode of the one that stood there."""
        module.train(getattr(self.parent, self.name).training)
        setattr(self.parent, self.name, module)

    def settle(self) -> None:
        """Let the module stand there that was decided on; the policy's own until then."""
        self.put(self.fp8 if self.kept else self.original)


class DecideAtFirstCall:
    """Takes the place of ``forward`` on a layer until its first batch says which precision is faster."""

    def __init__(self, place: Place, gate: GemmGate) -> None:
        self._place, self._gate = place, gate
        place.original.forward = self  # type: ignore[method-assign]

    def __call__(self, input: Tensor) -> Tensor:
        self.release()
        place = self._place
        place.kept, timing = self._gate.keeps(place.original, place.fp8, input)
        place.decision = f"FP8 is {timing.speedup:.3g} times as fast at {timing.shape.M} rows"
        place.settle()
        output: Tensor = getattr(place.parent, place.name)(input)
        return output

    def release(self) -> None:
        """Give the layer its own ``forward`` back; a second call does nothing."""
        if self._place.original.__dict__.get("forward") is self:
            del self._place.original.forward


class Fp8Layers:
    """FP8 linear layers in place on one policy.

    Args:
        gate: decides layer by layer at the first batch; None keeps FP8 in every place.
    """

    def __init__(
        self, kernel: LinearKernel, places: list[Place], skipped: list[ModuleChoice], gate: GemmGate | None
    ) -> None:
        self._kernel, self._places, self._skipped, self._gate = kernel, places, skipped, gate
        self._waiting: list[DecideAtFirstCall] = []
        if gate is not None:
            self._waiting = [DecideAtFirstCall(place, gate) for place in places]
        else:
            for place in places:
                place.settle()

    @property
    def gemm_table(self) -> GemmTable | None:
        """The timings that decided, None where nothing was timed."""
        return self._gate.table if self._gate is not None else None

    def describe(self) -> dict[str, Any]:
        """Recipe, kernel, every module with what is done to it, and the timings, for reports."""
        rejected = [
            {"path": choice.path, "shape": list(choice.shape), "reason": choice.reason} for choice in self._skipped
        ]
        for place in self._places:
            if not place.kept:
                rejected.append({"path": place.path, "shape": list(place.shape), "reason": place.decision})
        return {
            "format": dict(TRAINING_FORMAT),
            "recipe": self._kernel.recipe,
            "kernel": self._kernel.name,
            "fallback": self._kernel.fallback,
            "num_language_layers": len(self._places)
            + sum(choice.kind == "language_linear" for choice in self._skipped),
            "weights": sorted({str(place.original.weight.dtype) for place in self._places}),
            "converted": [
                {"path": place.path, "shape": list(place.shape), "kernel": self._kernel.name, "reason": place.decision}
                for place in self._places
                if place.kept
            ],
            "skipped": rejected,
            "gemm_gate": self._gate.describe() if self._gate is not None else self._not_timed(),
        }

    def _not_timed(self) -> str:
        return "not timed: emulated" if self._kernel.fallback else "not timed: gemm_gate.enabled=false"

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The policy's own layers for the time being."""
        for place in self._places:
            place.put(place.original)
        try:
            yield
        finally:
            for place in self._places:
                place.settle()

    def uninstall(self) -> None:
        """Put the policy's own layers back; their parameters were theirs all along."""
        for waiting in self._waiting:
            waiting.release()
        for place in self._places:
            place.put(place.original)


def install_kernel(policy: nn.Module, policy_type: str, kernel: LinearKernel, gate: GemmGate | None) -> Fp8Layers:
    """Compute the language model's linear layers by ``kernel``.

    Raises:
        ValueError: a policy type whose language model is not known, or weights without a float32 master copy.
    """
    places, skipped = [], []
    for choice in choose_modules(policy, policy_type):
        problem = kernel.shape_problem(choice.shape) if choice.convert else None
        if choice.convert and problem is None:
            places.append(_place(policy, choice, kernel, "undecided: no batch has come by yet"))
        else:
            reason = problem or choice.reason
            skipped.append(ModuleChoice(choice.path, choice.kind, choice.shape, False, reason))
    if not places:
        reasons = {choice.reason for choice in skipped if choice.kind == "language_linear"}
        raise ValueError(f"{kernel.name} can compute none of the language model's layers: {'; '.join(reasons)}.")
    if gate is None:
        for place in places:
            place.kept, place.decision = True, "linear layer of the language model's decoder"
    return Fp8Layers(kernel, places, skipped, gate)


def first_products_problem(kernel: LinearKernel, device: torch.device) -> str | None:
    """Why a kernel can't be used on a device that should run it: its first products fail or are wrong; or None.

    The run's random stream is left where it was.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        layer = nn.Linear(256, 128, bias=False, device=device)
        x_MK, slope_MN = (torch.randn(33, size, device=device, requires_grad=True) for size in (256, 128))
    wanted = _output_and_gradients(layer, layer.weight, x_MK, slope_MN)
    try:
        with torch.autocast(device.type, torch.bfloat16):
            got = _output_and_gradients(kernel.convert(layer), layer.weight, x_MK, slope_MN)
    except Exception as failure:
        # A kernel that should run may still refuse this machine; what it says becomes the reason.
        return f"the first products of {kernel.name} failed: {type(failure).__name__}: {failure}"
    errors = [float((ours.float() - theirs).norm() / theirs.norm()) for ours, theirs in zip(got, wanted, strict=True)]
    if not max(errors) <= TOLERANCE:
        return f"the first products of {kernel.name} are off by {max(errors):.2g} (relative), more than {TOLERANCE}"
    return None


def _output_and_gradients(layer: nn.Module, weight: Tensor, x_MK: Tensor, slope_MN: Tensor) -> list[Tensor]:
    output_MN = layer(x_MK)
    gradients = torch.autograd.grad(output_MN, (x_MK, weight), slope_MN.to(output_MN.dtype))
    return [output_MN.detach(), *gradients]


def _place(policy: nn.Module, choice: ModuleChoice, kernel: LinearKernel, decision: str) -> Place:
    parent_path, _, name = choice.path.rpartition(".")
    parent, layer = policy.get_submodule(parent_path), policy.get_submodule(choice.path)
    assert isinstance(layer, nn.Linear)
    _require_master_weight(choice.path, layer.weight)
    fp8 = kernel.convert(layer)
    return Place(choice.path, parent, name, layer, fp8, decision, None)


def _require_master_weight(path: str, weight: Tensor) -> None:
    """float32 where the optimizer changes the weight; a frozen weight may be in bfloat16.

    Raises:
        ValueError: float16 anywhere, or a trained weight that is not in float32.
    """
    if weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and not weight.requires_grad):
        return
    advice = "freeze the language model, or " if weight.dtype == torch.bfloat16 else ""
    raise ValueError(
        f"FP8 training changes master weights in float32, since single updates are lost in fewer digits; {path} is in "
        f"{weight.dtype}. To go on, {advice}load the policy in float32 (policy.dtype=float32 where there is that "
        "field) and let accelerate compute in bfloat16 (ACCELERATE_MIXED_PRECISION=bf16)."
    )
