# SPDX-License-Identifier: Apache-2.0
"""FP8 training on a CUDA device: a part of `gpu_check.py`.

1. The linear layers of both language models at their real sizes: forward and backward in bf16 and by every FP8 kernel
   that can run here, timed by the gate that a run decides by.
2. π0.5 and GR00T-N1.5, packed, weights in float32 under a bf16 autocast: a training step without FP8, and with every
   kernel in all layers and in those that the gate keeps; time, peak memory, loss and gradients against bf16.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, get_args

import torch
from gpu_policies import PROMPT_LENGTHS, REDUCED_GROOT, attempt, groot_of, real_pi05, reduced_pi05, seconds_of
from torch import Tensor, nn

from embodix.attention.cpu import SegmentSdpa
from embodix.packing.layout import PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix_fp8.precision.block_scaling import TransformerEngineKernel, transformer_engine_problem
from embodix_fp8.precision.gemm_gate import GemmGate
from embodix_fp8.precision.linear_layers import LinearKernel, install_kernel
from embodix_fp8.precision.torchao_float8 import Recipe, TorchaoKernel, fp8_units_problem, torchao_problem
from embodix_groot import testing as groot
from embodix_groot.architecture import PUBLIC_ARCHITECTURE
from embodix_groot.wrapper import GrootN15Wrapper
from embodix_pi05.testing import random_batch
from embodix_pi05.wrapper import Pi05Wrapper

DEVICE = torch.device("cuda")
TIME_LIMIT_SECONDS = 110
# Inputs and outputs of a decoder layer's linear maps at real size.
LAYERS = {
    "π0.5 q, o": (2048, 2048),
    "π0.5 k, v": (2048, 256),
    "π0.5 gate, up": (2048, 16384),
    "π0.5 down": (16384, 2048),
    "GR00T k, v": (2048, 1024),
    "GR00T gate, up": (2048, 6144),
    "GR00T down": (6144, 2048),
}
NUM_ROWS = (2275, 18203)  # packed prefixes of 4 and of 32 samples: no multiple of anything


def run_checks(record: dict[str, Any]) -> None:
    """Both parts, until the time limit; what did not fit into it is named. Kernels to be compiled come last."""
    start = time.monotonic()
    record["fp8_training_cannot_run"] = problems(DEVICE)
    for section, rows in (("fp8_gemm_gate", gate_rows(DEVICE)), ("fp8_training", step_rows(DEVICE))):
        for row, check in rows:
            if time.monotonic() - start > TIME_LIMIT_SECONDS:
                record[section].append({**row, "left_out": "the time limit was reached"})
                continue
            record[section].append({**row, **attempt(check)})
            print(json.dumps(record[section][-1]), flush=True)
            gc.collect()
            torch.cuda.empty_cache()


def problems(device: torch.device) -> dict[str, str]:
    """Why a library's kernels can't run here; empty where all can."""
    found = {
        "torchao": torchao_problem() or fp8_units_problem(device),
        "Transformer Engine": transformer_engine_problem(device),
    }
    return {name: reason for name, reason in found.items() if reason is not None}


def kernels(device: torch.device) -> list[LinearKernel]:
    """Every kernel that can run here, those that torch.compile has to build first last."""
    cannot = problems(device)
    found: list[LinearKernel] = []
    if "Transformer Engine" not in cannot:
        found.append(TransformerEngineKernel())
    if "torchao" not in cannot:
        found += [TorchaoKernel(recipe, None, compiled=False) for recipe in get_args(Recipe)]
        found += [TorchaoKernel(recipe, None, compiled=True) for recipe in get_args(Recipe)]
    return found


def gate_rows(device: torch.device) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    for kernel in kernels(device):
        for num_rows in NUM_ROWS:
            yield {"kernel": kernel.name, "rows": num_rows}, partial(check_gate, kernel, num_rows, device, LAYERS)


def check_gate(
    kernel: LinearKernel, num_rows: int, device: torch.device, layers: Mapping[str, tuple[int, int]]
) -> dict[str, Any]:
    """The gate's timings of every layer under a bf16 autocast; errors of output and gradients against float32."""
    gate = GemmGate(device, kernel.name)
    results: dict[str, Any] = {}
    for name, (num_inputs, num_outputs) in layers.items():
        layer = nn.Linear(num_inputs, num_outputs, bias=False, device=device)
        fp8_layer = kernel.convert(layer)
        x_MK = torch.randn(num_rows, num_inputs, device=device, requires_grad=True)
        slope_MN = torch.randn(num_rows, num_outputs, device=device)
        with torch.autocast(device.type, torch.bfloat16):
            kept, timing = gate.keeps(layer, fp8_layer, x_MK)
            own = _products(fp8_layer, layer.weight, x_MK, slope_MN)
        reference = _products(layer, layer.weight, x_MK, slope_MN)
        results[name] = {
            "bf16_ms": 1e3 * timing.high_precision_s,
            "fp8_ms": 1e3 * timing.fp8_s,
            "speedup": timing.speedup,
            "kept": kept,
            "errors": [float((a.float() - b).norm() / b.norm()) for a, b in zip(own, reference, strict=True)],
        }
    return results


def _products(layer: nn.Module, weight: Tensor, x_MK: Tensor, slope_MN: Tensor) -> list[Tensor]:
    output_MN = layer(x_MK)
    gradients = torch.autograd.grad(output_MN, (x_MK, weight), slope_MN.to(output_MN.dtype))
    return [output_MN.detach(), *gradients]


def step_rows(device: torch.device) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    for name, (policy_type, build) in policies().items():
        yield {"policy": name}, partial(check_steps, policy_type, build, device)


def policies() -> dict[str, tuple[str, Callable[[], Any]]]:
    """Type and constructor of what fits this device, weights in float32."""
    chosen: dict[str, tuple[str, Callable[[], Any]]] = {
        "pi05 reduced": ("pi05", partial(reduced_pi05, dtype="float32")),
        "groot reduced": ("groot", partial(groot_of, REDUCED_GROOT, tuned=True)),
    }
    if torch.cuda.get_device_properties(0).total_memory > 70 * 2**30:
        chosen["pi05 real"] = ("pi05", partial(real_pi05, dtype="float32", empty_cameras=1))
        chosen["groot real"] = ("groot", partial(groot_of, PUBLIC_ARCHITECTURE, tuned=True))
    return chosen


def check_steps(policy_type: str, build: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Forward and backward of one packed batch: without FP8, then with every kernel, ungated and gated."""
    policy = build()
    wrapper = Pi05Wrapper() if policy_type == "pi05" else GrootN15Wrapper()
    wrapper.install(policy, FastPathSettings(PaddingFreePacker(), SegmentSdpa()))
    if policy_type == "pi05":
        batch = random_batch(policy, PROMPT_LENGTHS, padded_length=200)
    else:
        batch = groot.random_batch(policy, [55] * len(PROMPT_LENGTHS), [2] * len(PROMPT_LENGTHS))
    batch = {name: value.to(device) for name, value in batch.items()}
    step = partial(_step, policy, batch, _autocast(policy_type, device))
    reference = _measured(policy, step)
    results: dict[str, Any] = {"bf16": reference.facts}
    for kernel in kernels(device):
        for gate in (None, GemmGate(device, kernel.name)):
            name = f"{kernel.name}, {'gated' if gate else 'every layer'}"
            results[name] = attempt(partial(_with_kernel, policy, policy_type, kernel, gate, step, reference))
    return results


def _autocast(policy_type: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """GR00T opens an autocast of its own."""
    if policy_type == "groot":
        return nullcontext
    return partial(torch.autocast, device.type, torch.bfloat16)


def _step(policy: Any, batch: dict[str, Any], autocast: Callable[[], AbstractContextManager[Any]]) -> float:
    policy.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    with autocast():
        loss, _ = policy.forward(batch)
    loss.backward()
    return float(loss.detach())


class _Measured:
    """Loss, time and peak memory of a step, and the gradients of the language model's linear layers."""

    def __init__(self, loss: float, seconds: float, peak_bytes: int, gradients: dict[str, Tensor]) -> None:
        self.facts = {"loss": loss, "seconds": seconds, "peak_bytes": peak_bytes}
        self.gradients = gradients


def _measured(policy: Any, step: Callable[[], float]) -> _Measured:
    loss = step()
    gradients = {
        name: parameter.grad.detach().cpu()
        for name, parameter in policy.named_parameters()
        if parameter.grad is not None and "language_model" in name and "_proj.weight" in name
    }
    torch.cuda.reset_peak_memory_stats()
    return _Measured(loss, seconds_of(step, 5), torch.cuda.max_memory_allocated(), gradients)


def _with_kernel(
    policy: Any,
    policy_type: str,
    kernel: LinearKernel,
    gate: GemmGate | None,
    step: Callable[[], float],
    reference: _Measured,
) -> dict[str, Any]:
    installation = install_kernel(policy, policy_type, kernel, gate)
    try:
        own = _measured(policy, step)
        described = installation.describe()
    finally:
        installation.uninstall()
    cosines = {
        name: torch.nn.functional.cosine_similarity(own.gradients[name].flatten(), theirs.flatten(), dim=0).item()
        for name, theirs in reference.gradients.items()
        if theirs.any()
    }
    return {
        **own.facts,
        "ratio": reference.facts["seconds"] / own.facts["seconds"],
        "loss_relative_difference": own.facts["loss"] / reference.facts["loss"] - 1,
        "smallest_gradient_cosine": min(cosines.items(), key=lambda item: item[1]),
        "layers_in_fp8": len(described["converted"]),
    }
