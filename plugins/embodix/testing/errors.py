# SPDX-License-Identifier: Apache-2.0
"""How far two computations of the same thing are apart, and what one training run leaves to compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Gradients = Mapping[str, Tensor | None]


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """``|got - wanted| / |wanted|`` in the Frobenius norm; 0 when both are zero, infinite when only ``wanted`` is."""
    difference = (got.detach().double() - wanted.detach().double()).norm()
    scale = wanted.detach().double().norm()
    if scale == 0:
        return 0.0 if difference == 0 else float("inf")
    return float(difference / scale)


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    """A copy of every parameter's gradient by name, None where there is none."""
    return {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in module.named_parameters()
    }


@dataclass
class GradientComparison:
    """Two sets of gradients, compared.

    Attributes:
        worst: largest relative error of a tensor.
        worst_name: the tensor that has it.
        structure: tensors that are None or exactly zero on one side only.
        whole: relative error of all gradients as one vector.
    """

    worst: float = 0.0
    worst_name: str = ""
    structure: list[str] = field(default_factory=list)
    whole: float = 0.0


def compare_gradients(got: Gradients, wanted: Gradients) -> GradientComparison:
    """Compare gradients by name, None and exact-zero structure included.

    The bias of a key projection shifts all scores of a query alike, so its true gradient is zero and what is
    computed is rounding error: it is measured against the gradient of the same projection's weight.

    Raises:
        ValueError: no gradient to compare with.
    """
    if all(gradient is None for gradient in wanted.values()):
        raise ValueError(f"None of {len(wanted)} parameters has a gradient to compare with; call backward first.")
    comparison = GradientComparison()
    comparison.structure = sorted(set(got) ^ set(wanted))
    norms = {name: float(value.double().norm()) for name, value in wanted.items() if value is not None}
    squared_difference = 0.0
    for name in sorted(set(got) & set(wanted)):
        ours, theirs = got[name], wanted[name]
        if ours is None or theirs is None:
            if ours is not theirs:
                comparison.structure.append(f"{name}: None on one side only")
            continue
        if bool(torch.any(ours != 0)) != bool(torch.any(theirs != 0)):
            comparison.structure.append(f"{name}: zero on one side only")
        difference = float((ours.double() - theirs.double()).norm())
        squared_difference += difference**2
        is_key_bias = name.endswith(("k_proj.bias", "to_k.bias"))
        scale_name = name.removesuffix("bias") + "weight" if is_key_bias else name
        error = difference / norms[scale_name] if difference else 0.0
        if not error <= comparison.worst:
            comparison.worst, comparison.worst_name = error, name
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    comparison.whole = squared_difference**0.5 / total if total else 0.0
    return comparison


@dataclass(frozen=True)
class TrainingRun:
    """Loss, gradients by parameter name, and the state of the random generator afterwards."""

    loss: float
    gradients: dict[str, Tensor | None]
    random_state: Tensor


def finish_run(policy: Any, loss: Tensor) -> TrainingRun:
    """Backward; the gradients are copied and cleared."""
    policy.zero_grad(set_to_none=True)
    loss.backward()
    run = TrainingRun(loss.item(), gradients_of(policy), torch.get_rng_state())
    policy.zero_grad(set_to_none=True)
    return run
