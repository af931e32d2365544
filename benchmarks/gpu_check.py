# SPDX-License-Identifier: Apache-2.0
"""Everything that needs a CUDA device, in one run of a few minutes.

1. Every CUDA attention backend against dense fp32 attention (outputs and gradients) at the head sizes of π0.5,
   Qwen3, SigLIP and GR00T's DiT, with its time for one π0.5 layer.
2. π0.5 and GR00T-N1.5 in bf16, reduced and real size, packed against upstream: loss, gradients and time of forward +
   backward, and peak memory. GR00T's prompts have one length, since upstream attends to the padding of shorter ones.
3. Block-scaled FP8 (`gpu_fp8.py`): products on tensor cores against float32, inference against bf16.
4. FP8 training (`gpu_fp8_training.py`): the linear layers at real size by every kernel, a training step against bf16.

    python benchmarks/gpu_check.py --output benchmarks/results

Without a CUDA device it says so, writes a record marked as unmeasured, and exits with 0.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_fp8
import gpu_fp8_training
import torch
from gpu_policies import PROMPT_LENGTHS, REDUCED_GROOT, attempt, groot_of, real_pi05, reduced_pi05, seconds_of

from embodix.attention import Segments
from embodix.attention.cpu import SegmentSdpa
from embodix.attention.cuda import FlashAttention2, FlashAttention4, Flex, TorchVarlen
from embodix.attention.select import reference_attention
from embodix.contracts import AttentionBackend, PolicyWrapper
from embodix.packing.layout import PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix.report.benchmark import require_quotable, write_benchmark
from embodix.testing.errors import compare_gradients, gradients_of, relative_error
from embodix_groot import testing as groot
from embodix_groot.architecture import PUBLIC_ARCHITECTURE
from embodix_groot.wrapper import GrootN15Wrapper
from embodix_pi05.testing import random_batch
from embodix_pi05.wrapper import Pi05Wrapper

BACKENDS: tuple[Callable[[], AttentionBackend], ...] = (
    FlashAttention2,
    FlashAttention4,
    TorchVarlen,
    Flex,
    SegmentSdpa,
)
HEAD_DIMS = (256, 128, 72, 48)
TIME_LIMIT_SECONDS = 240


def check_backend(make: Callable[[], AttentionBackend], head_dim: int) -> dict[str, Any]:
    """Errors against dense fp32 attention and the time of one prefix-LM layer (two calls), forward + backward."""
    device, backend = torch.device("cuda"), make()
    row: dict[str, Any] = {"backend": backend.name, "head_dim": head_dim}
    reason = backend.probe(device, torch.bfloat16, head_dim)
    if reason:
        return {**row, "cannot_run": reason}
    prefix = [512 + length for length in PROMPT_LENGTHS]
    suffix = [50] * len(prefix)
    calls = {
        "prefix": Segments.from_lengths(prefix, prefix, device),
        "suffix": Segments.from_lengths(suffix, [length + 50 for length in prefix], device),
    }
    seconds = 0.0
    for name, segments in calls.items():
        generator = torch.Generator(device).manual_seed(0)
        sizes = [(sum(segments.lengths_q), 8), (sum(segments.lengths_k), 1), (sum(segments.lengths_k), 1)]
        inputs = [
            torch.randn(*size, head_dim, generator=generator, device=device, dtype=torch.bfloat16).requires_grad_()
            for size in sizes
        ]
        slope = torch.randn(inputs[0].shape, generator=generator, device=device, dtype=torch.bfloat16)

        def run(call: Callable[..., torch.Tensor], inputs=inputs, slope=slope, segments=segments) -> list[torch.Tensor]:
            output = call(*inputs, segments)
            return [output, *torch.autograd.grad(output, inputs, slope.to(output.dtype))]

        pairs = zip(("out", "dq", "dk", "dv"), run(backend), run(reference_attention), strict=True)
        row[name] = {part: relative_error(got, wanted) for part, got, wanted in pairs}
        seconds += seconds_of(lambda run=run: run(backend))
    return {**row, "milliseconds_a_layer": seconds * 1e3}


def check_policy(
    policy: Any, batch: dict[str, Any], wrapper: PolicyWrapper, backend: AttentionBackend
) -> dict[str, Any]:
    """Packed against upstream on the same policy, batch and random stream."""
    batch = {name: value.cuda() for name, value in batch.items()}

    def step() -> float:
        policy.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        loss, _ = policy.forward(batch)
        loss.backward()
        return loss.item()

    runs: dict[str, dict[str, Any]] = {}
    gradients = {}
    for name in ("upstream", "fast"):
        installation = None
        if name == "fast":
            installation = wrapper.install(policy, FastPathSettings(PaddingFreePacker(), backend))
        torch.cuda.reset_peak_memory_stats()
        loss = step()
        gradients[name] = gradients_of(policy)
        runs[name] = {"loss": loss, "seconds": seconds_of(step, 5), "peak_bytes": torch.cuda.max_memory_allocated()}
        if installation is not None:
            installation.uninstall()
    comparison = compare_gradients(gradients["fast"], gradients["upstream"])
    return {
        **runs,
        "ratio": runs["upstream"]["seconds"] / runs["fast"]["seconds"],
        "loss_relative_difference": abs(runs["fast"]["loss"] / runs["upstream"]["loss"] - 1),
        "gradient_difference_whole": comparison.whole,
        "gradient_structure_differences": comparison.structure,
    }


Case = Callable[[AttentionBackend], dict[str, Any]]


def pi05_case(build: Callable[[], Any]) -> Case:
    def check(backend: AttentionBackend) -> dict[str, Any]:
        policy = build()
        return check_policy(policy, random_batch(policy, PROMPT_LENGTHS, padded_length=200), Pi05Wrapper(), backend)

    return check


def groot_case(architecture: dict[str, Any], tuned: bool) -> Case:
    def check(backend: AttentionBackend) -> dict[str, Any]:
        policy = groot_of(architecture, tuned)
        batch = groot.random_batch(policy, [55] * len(PROMPT_LENGTHS), [2] * len(PROMPT_LENGTHS))
        return check_policy(policy, batch, GrootN15Wrapper(), backend)

    return check


def policy_cases(device_bytes: int) -> dict[str, tuple[int, Case]]:
    """Head size and check of what fits this device; π0.5 with two cameras of three, GR00T with two."""
    chosen = {
        "pi05 reduced": (256, pi05_case(reduced_pi05)),
        "groot reduced, tuned": (128, groot_case(REDUCED_GROOT, tuned=True)),
    }
    if device_bytes > 40 * 2**30:
        chosen["pi05 real"] = (256, pi05_case(lambda: real_pi05(dtype="bfloat16", empty_cameras=1)))
        chosen["groot real, frozen"] = (128, groot_case(PUBLIC_ARCHITECTURE, tuned=False))
        chosen["groot real, tuned"] = (128, groot_case(PUBLIC_ARCHITECTURE, tuned=True))
    return chosen


def run_checks(record: dict[str, Any]) -> None:
    """All checks, until the time limit; what did not fit into it is named."""
    start = time.monotonic()
    for make in BACKENDS:
        for head_dim in HEAD_DIMS:
            record["attention"].append(attempt(lambda make=make, head_dim=head_dim: check_backend(make, head_dim)))
            print(json.dumps(record["attention"][-1]), flush=True)
    ran = {(row["backend"], row["head_dim"]) for row in record["attention"] if "milliseconds_a_layer" in row}
    for size, (head_dim, check) in policy_cases(torch.cuda.get_device_properties(0).total_memory).items():
        for make in BACKENDS:
            if (make().name, head_dim) not in ran:
                continue
            row = {"policy": size, "attention": make().name}
            if time.monotonic() - start > TIME_LIMIT_SECONDS:
                record["policies"].append({**row, "left_out": "the time limit was reached"})
                continue
            record["policies"].append({**row, **attempt(lambda check=check, make=make: check(make()))})
            print(json.dumps(record["policies"][-1]), flush=True)
            gc.collect()
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--allow-dirty", action="store_true", help="measure uncommitted code; marks the result")
    options = parser.parse_args()
    require_quotable(options.allow_dirty)
    record: dict[str, Any] = {
        "title": "π0.5, GR00T-N1.5, their attention backends and FP8 on a CUDA device",
        "measured": torch.cuda.is_available(),
        "attention": [],
        "policies": [],
        "fp8_products": [],
        "fp8_inference": [],
        "fp8_gemm_gate": [],
        "fp8_training": [],
    }
    if record["measured"]:
        run_checks(record)
        gpu_fp8.run_checks(record)
        gpu_fp8_training.run_checks(record)
    else:
        record["why_not"] = "no CUDA device"
        print("gpu_check: no CUDA device; nothing was measured.")
    write_benchmark(options.output / "gpu_check", record, options.allow_dirty)
    rows = [row for section in record.values() if isinstance(section, list) for row in section]
    failed = [row for row in rows if "failed" in row]
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
