# SPDX-License-Identifier: Apache-2.0
"""Block-scaled FP8 on a CUDA device: a part of `gpu_check.py`.

1. Linear layers of both language models: every kernel that can run, against the float32 product of the same rounded
   operands, with the time of bf16 beside it. On a GPU without FP8 tensor cores for blocks the probe's reason stands in
   the place of `scaled_mm`.
2. π0.5 and GR00T-N1.5 in bf16, reduced and real size, packed: an action chunk unquantized, and with the language model
   in FP8 by every kernel; time, peak memory, and how far the actions are from the unquantized ones.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fp8_formats import products, time_in_turns
from gpu_policies import PROMPT_LENGTHS, REDUCED_GROOT, attempt, groot_of, real_pi05, reduced_pi05, seconds_of

from embodix import plugins
from embodix.attention.select import choose_backend
from embodix.packing.layout import PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix.testing.errors import relative_error
from embodix_fp8.blocks import quantize_blocks
from embodix_fp8.fp8_block import Fp8BlockQuantizer
from embodix_fp8.kernels import KERNELS, kernel_problem
from embodix_groot import testing as groot
from embodix_groot.architecture import PUBLIC_ARCHITECTURE
from embodix_groot.wrapper import GrootN15Wrapper
from embodix_pi05.testing import random_batch
from embodix_pi05.wrapper import Pi05Wrapper

DEVICE = torch.device("cuda")
TIME_LIMIT_SECONDS = 110
LAYERS = {"π0.5 gate": (16384, 2048), "π0.5 down": (2048, 16384), "π0.5 key": (256, 2048), "GR00T gate": (6144, 2048)}
NUM_ROWS = (1, 50, 1137, 2275)  # not multiples of 4, but one
RECIPES: dict[str, dict[str, Any]] = {
    "auto": {},
    "weights only": {"activations": "high", "kernel": "dequantize"},
    "weights only, compiled": {"activations": "high", "kernel": "dequantize_compiled"},
    "dequantized at load": {"activations": "high", "kernel": "dequantize_at_load"},
}


def run_checks(record: dict[str, Any]) -> None:
    """Both parts, until the time limit; what did not fit into it is named."""
    start = time.monotonic()
    record["fp8_tensor_cores"] = kernel_problem("scaled_mm", DEVICE, torch.bfloat16) or "usable"
    for name, shape in LAYERS.items():
        for num_rows in NUM_ROWS:
            row = {"layer": name, "rows": num_rows}
            record["fp8_products"].append({**row, **attempt(partial(check_products, shape, num_rows))})
            print(json.dumps(record["fp8_products"][-1]), flush=True)
    for size, (policy_type, build) in policies().items():
        row = {"policy": size}
        if time.monotonic() - start > TIME_LIMIT_SECONDS:
            record["fp8_inference"].append({**row, "left_out": "the time limit was reached"})
            continue
        record["fp8_inference"].append({**row, **attempt(partial(check_inference, policy_type, build))})
        print(json.dumps(record["fp8_inference"][-1]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


@torch.no_grad()
def check_products(shape: tuple[int, int], num_rows: int) -> dict[str, Any]:
    """Errors of every kernel against its definition in float32, and milliseconds of each product."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    weight = torch.randn(shape, generator=generator, device=DEVICE) / shape[1] ** 0.5
    rows = torch.randn(num_rows, shape[1], generator=generator, device=DEVICE).bfloat16()
    scaled = quantize_blocks(weight)
    errors = {}
    for name, kernel in KERNELS.items():
        if kernel_problem(name, weight.device, rows.dtype) is None and kernel.shape_problem(shape) is None:
            reference = KERNELS["scaled_mm_emulated" if kernel.fp8_activations else "dequantize"]
            errors[name] = relative_error(kernel(rows, scaled), reference(rows.float(), scaled))
    calls = {name: partial(call, rows) for name, call in products(weight, rows.dtype).items()}
    seconds = time_in_turns(calls, 10, weight.device)
    return {
        "errors": errors,
        "milliseconds": {name: 1e3 * value for name, value in seconds.items()},
        "ratios": {name: seconds["unquantized"] / value for name, value in seconds.items()},
    }


def policies() -> dict[str, tuple[str, Callable[[], Any]]]:
    """Type and constructor of what fits this device."""
    chosen: dict[str, tuple[str, Callable[[], Any]]] = {
        "pi05 reduced": ("pi05", reduced_pi05),
        "groot reduced": ("groot", partial(groot_of, REDUCED_GROOT)),
    }
    if torch.cuda.get_device_properties(0).total_memory > 40 * 2**30:
        chosen["pi05 real"] = ("pi05", partial(real_pi05, dtype="bfloat16", empty_cameras=1))
        chosen["groot real"] = ("groot", partial(groot_of, PUBLIC_ARCHITECTURE))
    return chosen


def check_inference(policy_type: str, build: Callable[[], Any]) -> dict[str, Any]:
    """An action chunk for four observations: unquantized, then by every recipe."""
    policy = build().eval()
    wrapper = Pi05Wrapper() if policy_type == "pi05" else GrootN15Wrapper()
    candidates = plugins.registry().names("attention_backends")
    backend = choose_backend(
        "auto",
        DEVICE,
        torch.bfloat16,
        wrapper.head_dim(policy),
        {name: partial(plugins.build, "attention_backends", name, {}) for name in candidates},
    )
    wrapper.install(policy, FastPathSettings(PaddingFreePacker(), backend))
    if policy_type == "pi05":
        batch = random_batch(policy, PROMPT_LENGTHS, padded_length=200)
    else:
        batch = groot.random_batch(policy, [55] * len(PROMPT_LENGTHS), [2] * len(PROMPT_LENGTHS))
    batch = {name: value.to(DEVICE) for name, value in batch.items()}
    wanted, found = measured(policy, batch)
    results: dict[str, Any] = {"attention": backend.name, "unquantized": found}
    for name, options in RECIPES.items():
        results[name] = attempt(partial(check_recipe, policy, policy_type, batch, options, wanted))
        if "seconds" in results[name]:
            results[name]["ratio"] = found["seconds"] / results[name]["seconds"]
    return results


def check_recipe(
    policy: Any, policy_type: str, batch: dict[str, Any], options: dict[str, Any], wanted: torch.Tensor
) -> dict[str, Any]:
    """Time, memory and actions with one recipe installed."""
    installation = Fp8BlockQuantizer(**options).install(policy, policy_type)
    try:
        actions, found = measured(policy, batch)
        described = installation.describe()
    finally:
        installation.uninstall()
    return {
        **found,
        "kernels": described["backend"],
        "fallback": described["fallback"],
        "language_model_bytes": described["num_bytes"],
        "action_difference": relative_error(actions, wanted),
    }


def measured(policy: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Actions, median seconds of a chunk, and the memory a chunk takes beside the weights."""

    def act() -> torch.Tensor:
        torch.manual_seed(0)
        return policy.predict_action_chunk(dict(batch))

    actions = act()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = seconds_of(act, 5)
    return actions, {"seconds": seconds, "working_bytes": torch.cuda.max_memory_allocated() - before}
