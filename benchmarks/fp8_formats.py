# SPDX-License-Identifier: Apache-2.0
"""FP8 formats on the same weights: error over the weights' range, bytes, and the time of a product on this device.

Error: normal weights, one of which (or one column of which) is so many standard deviations large; what that does to
the others. Time: one linear layer of π0.5's language model, its weight in each format and by each kernel, process CPU
time (device time on a GPU), all taking turns; a ratio is to the unquantized layer in the same dtype. What compiling
costs once stands beside what it saves at every call.

    python benchmarks/fp8_formats.py --output benchmarks/results
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from embodix.report.benchmark import require_quotable, write_benchmark
from embodix_fp8.blocks import ScaledWeight
from embodix_fp8.kernels import KERNELS, kernel_problem, quantize_rows
from embodix_fp8.side_by_side import FORMATS, blocks_matter, compare_formats, quantize_in, weights_of_range

RANGES = (5, 1e2, 1e3, 1e4, 3e4, 1e5, 3e5, 1e6)
LAYERS = {"attention output 2048 x 2048": (2048, 2048), "MLP gate 16384 x 2048": (16384, 2048)}
ROWS = {"cpu": (50, 300, 1000), "cuda": (50, 300, 1000, 4000)}


def error_rows(size: int, num_rows: int) -> list[dict[str, Any]]:
    """Errors of every format over the range of the weights."""
    activations = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(1))
    rows = []
    for pattern in ("one weight", "one column"):
        for amax_over_sigma in RANGES:
            weight, outliers = weights_of_range((size, size), amax_over_sigma, pattern)
            errors = compare_formats(weight, activations, outliers)
            for error in errors:
                known = {"outliers": pattern, "amax_over_sigma": amax_over_sigma}
                rows.append({**known, **asdict(error), "blocks_matter": blocks_matter(errors)})
    return rows


def products(weight: Tensor, dtype: torch.dtype) -> dict[str, Callable[[Tensor], Tensor]]:
    """The layer unquantized, in every format, and in blocks by every kernel that can run here."""
    dense = weight.to(dtype)
    scaled = {name: quantize_in(weight, name) for name in FORMATS}
    found: dict[str, Callable[[Tensor], Tensor]] = {"unquantized": lambda x: F.linear(x, dense)}
    found |= {f"{name}, dequantize": partial(_with, "dequantize", scaled[name]) for name in FORMATS}
    for name in KERNELS:
        if name != "dequantize" and kernel_problem(name, weight.device, dtype) is None:
            found[f"128x128, {name}"] = partial(_with, name, scaled["128x128"])
    if weight.device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 9) and dtype == torch.bfloat16:
        found["per-tensor, scaled_mm"] = partial(_scaled_mm, scaled["per-tensor"], F.ScalingType.TensorWise)
        found["per-row, scaled_mm"] = partial(_scaled_mm, scaled["per-row"], F.ScalingType.RowWise)
    return found


def _with(kernel: str, weight: ScaledWeight, x: Tensor) -> Tensor:
    return KERNELS[kernel](x, weight)


def _scaled_mm(weight: ScaledWeight, recipe: F.ScalingType, x: Tensor) -> Tensor:
    """Activations scaled as the weight is: one scale for all, or one a row."""
    block = tuple(x.shape) if recipe == F.ScalingType.TensorWise else (1, x.shape[1])
    rows = quantize_rows(x, block)
    scales = (rows.scale_inv, weight.scale_inv)
    if recipe == F.ScalingType.TensorWise:
        scales = (scales[0].reshape(()), scales[1].reshape(()))
    return F.scaled_mm(rows.values, weight.values.t(), scales[0], recipe, scales[1], recipe, output_dtype=x.dtype)


@torch.no_grad()
def time_in_turns(calls: Mapping[str, Callable[[], Any]], repetitions: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each call, after a warm-up, one after the other in every repetition."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            seconds[name].append(_seconds(call, device))
    return {name: statistics.median(values) for name, values in seconds.items()}


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.process_time()
        call()
        return time.process_time() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    call()
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event) / 1e3


def speed_rows(device: torch.device, repetitions: int) -> list[dict[str, Any]]:
    """Times of every layer, number of rows and dtype."""
    rows = []
    for layer, shape in LAYERS.items():
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
        for dtype in (torch.bfloat16, torch.float32):
            calls = products(weight, dtype)
            for num_rows in ROWS[device.type]:
                x = torch.randn(num_rows, shape[1], generator=torch.Generator().manual_seed(2)).to(device, dtype)
                seconds = time_in_turns({name: partial(call, x) for name, call in calls.items()}, repetitions, device)
                known = {"layer": layer, "dtype": str(dtype).removeprefix("torch."), "rows": num_rows}
                for name, value in seconds.items():
                    ratio = seconds["unquantized"] / value
                    rows.append({**known, "product": name, "milliseconds": 1e3 * value, "ratio": ratio})
                print(known, {name: round(1e3 * value, 2) for name, value in seconds.items()}, flush=True)
    return rows


def compile_seconds(device: torch.device) -> dict[str, Any]:
    """What the first compiled product of a process takes with nothing cached, and one of another shape after it."""
    problem = KERNELS["dequantize_compiled"].probe(device, torch.bfloat16)
    if problem is not None:
        return {"problem": problem}
    seconds = []
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": cache}):
        for shape in ((384, 512), (512, 640)):
            weight = quantize_in(torch.randn(shape).to(device), "128x128")
            start = time.perf_counter()
            KERNELS["dequantize_compiled"](torch.randn(3, shape[1], device=device, dtype=torch.bfloat16), weight)
            seconds.append(time.perf_counter() - start)
    return {"wall_seconds_of_the_first_shape": seconds[0], "wall_seconds_of_another_shape": seconds[1]}


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """From which range on blocks keep what one scale a tensor loses."""
    matter = [row["amax_over_sigma"] for row in rows if row["blocks_matter"] and row["format"] == "128x128"]
    not_yet = [row["amax_over_sigma"] for row in rows if not row["blocks_matter"] and row["format"] == "128x128"]
    return {"blocks_matter_from_amax_over_sigma": min(matter), "not_up_to": max(not_yet)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--size", type=int, default=2048, help="rows and columns of the weights whose error is measured"
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--allow-dirty", action="store_true", help="measure uncommitted code; marks the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    require_quotable(options.allow_dirty)
    device = torch.device(options.device)
    compiling = compile_seconds(device)
    errors = error_rows(options.size, 64)
    decided = verdict(errors)
    result = {
        "title": "FP8 formats on the same weights",
        "what": f"Normal weights of {options.size} x {options.size}, one of them (or one column) so many standard "
        "deviations large: relative error of the others, their share that became zero, and the error of a product that "
        "they take part in, with activations in high precision and in e4m3 with one scale for 128 channels.",
        "blocks": f"e4m3 is a floating-point format: up to a range of {decided['not_up_to']:.0e} all formats have the "
        f"same error, and blocks buy nothing. From {decided['blocks_matter_from_amax_over_sigma']:.0e} on one scale a "
        "tensor zeroes the small weights, blocks only those beside the outlier; one scale a row helps against a single "
        "weight, not against a column.",
        "errors": errors,
        "compiling": compiling,
        "ratio": "the unquantized layer's time over this one's, in the same dtype; above 1 it is faster. A weight "
        "dequantized at load has the unquantized layer's time.",
        "products": speed_rows(device, options.repetitions),
    }
    write_benchmark(options.output / "fp8_formats", result, options.allow_dirty)


if __name__ == "__main__":
    main()
