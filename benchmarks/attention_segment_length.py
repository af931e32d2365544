# SPDX-License-Identifier: Apache-2.0
"""Folded GEMMs, transposed GEMMs and one padded batch against torch SDPA on a CPU: where ``segment_auto`` switches.

Process CPU time of forward + backward of one layer's attention over about 1024 tokens (two segments at least): by
segment length at π0.5's and a small model's head sizes, and by channels of a head for the transposed GEMMs. A ratio is
SDPA's time over the other's: above 1, SDPA is slower.

    python benchmarks/attention_segment_length.py --output benchmarks/results
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from embodix.attention import Segments
from embodix.attention.cpu import SegmentGemm, SegmentSdpa, SegmentTransposed, batched_attention
from embodix.report.benchmark import require_quotable, write_benchmark

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
CHANNELS = (8, 16, 32, 64, 128)
TRANSPOSED_LENGTHS = (128, 256, 577, 1024)
HEADS = {"grouped": (8, 1), "not grouped": (8, 8)}


def forward_backward(backend: Any, inputs: list[torch.Tensor], segments: Segments, **options: bool) -> float:
    """CPU seconds of one call with its gradients."""
    start = time.process_time()
    output = backend(*inputs, segments, **options)
    torch.autograd.grad(output, inputs, output.detach())
    return time.process_time() - start


def batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments) -> torch.Tensor:
    """All segments in one padded batch."""
    return batched_attention(q, k, v, segments, q.shape[-1] ** -0.5)


def measure(
    length: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, repetitions: int
) -> dict[str, float]:
    """Median of SDPA's time over the others' in alternating repetitions; one segment is shorter than the rest."""
    lengths = (length - 1, *[length] * max(1, 1024 // length - 1))
    segments = Segments.from_lengths(lengths, lengths)
    sizes = ((sum(lengths), heads[0]), (sum(lengths), heads[1]), (sum(lengths), heads[1]))
    inputs = [torch.randn(*size, head_dim).to(dtype).requires_grad_() for size in sizes]
    backends = {"sdpa": SegmentSdpa(), "gemm": SegmentGemm(), "batch": batch}
    seconds: dict[str, list[float]] = {name: [] for name in backends}
    for repetition in range(repetitions + 1):
        for name, backend in backends.items():
            taken = forward_backward(backend, inputs, segments)
            if repetition:
                seconds[name].append(taken)
    return {
        name: statistics.median(s / other for s, other in zip(seconds["sdpa"], seconds[name], strict=True))
        for name in ("gemm", "batch")
    }


def measure_transposed(length: int, head_dim: int, causal: bool, repetitions: int) -> float:
    """Median of SDPA's time over that of transposed GEMMs in fp32, 512 channels in all; lengths differ by one."""
    lengths = (length - 1, *[length] * max(1, 1024 // length - 1))
    segments = Segments.from_lengths(lengths, lengths)
    size = (sum(lengths), 512 // head_dim, head_dim)
    inputs = [torch.randn(size).requires_grad_() for _ in range(3)]
    ratios = []
    for _ in range(repetitions + 1):
        seconds = [
            forward_backward(backend, inputs, segments, causal=causal)
            for backend in (SegmentSdpa(), SegmentTransposed())
        ]
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios[1:])


def transposed_rows(repetitions: int) -> list[dict[str, Any]]:
    """Transposed GEMMs by channels of a head and length of a segment, bidirectional and causal."""
    rows = []
    for causal in (False, True):
        for head_dim in CHANNELS:
            ratios = {n: measure_transposed(n, head_dim, causal, repetitions) for n in TRANSPOSED_LENGTHS}
            rows += [{"causal": causal, "head_dim": head_dim, "segment": n, "transposed": r} for n, r in ratios.items()]
            print("transposed", f"{causal=}", head_dim, {n: round(r, 2) for n, r in ratios.items()}, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--allow-dirty", action="store_true", help="measure uncommitted code; marks the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    require_quotable(options.allow_dirty)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for kind, heads in HEADS.items():
            for head_dim in (32, 256):
                ratios = {n: measure(n, heads, head_dim, dtype, options.repetitions) for n in LENGTHS}
                rows += [
                    {"dtype": str(dtype), "heads": kind, "head_dim": head_dim, "segment": length, **row}
                    for length, row in ratios.items()
                ]
                print(
                    dtype,
                    kind,
                    head_dim,
                    {n: [round(r, 2) for r in row.values()] for n, row in ratios.items()},
                    flush=True,
                )
    result = {
        "title": "Attention of short and long segments on a CPU",
        "what": "torch SDPA's CPU time of forward + backward over that of folded GEMMs and of one padded batch; above "
        "1 SDPA is slower. About 1024 tokens in segments of the given length. Transposed: the same over GEMMs with "
        "tokens as the contiguous side, fp32, 512 channels in all.",
        "ratios": rows,
        "transposed": transposed_rows(options.repetitions),
    }
    write_benchmark(options.output / "attention_segment_length", result, options.allow_dirty)


if __name__ == "__main__":
    main()
