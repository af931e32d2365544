# SPDX-License-Identifier: Apache-2.0
"""Time each linear layer's matrix products in both precisions and keep FP8 only where it is faster.

Whether FP8 pays depends on the shape and the device: casting costs passes over memory that only large products win
back (LoongForge's adaptive FP8 gates every GEMM by measurement; a small product in FP8 is slower than in bfloat16).

Shape letters: M rows of the batch, K inputs, N outputs.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

NUM_WARM_UP, NUM_TIMED = 3, 10

# Seconds of one call of a function that works on a device.
Clock = Callable[[Callable[[], None], torch.device], float]


def seconds_a_call(run: Callable[[], None], device: torch.device) -> float:
    """Median over ten calls after three that are not counted, by events on a GPU."""
    for _ in range(NUM_WARM_UP):
        run()
    if device.type != "cuda":
        return statistics.median(_wall_seconds(run) for _ in range(NUM_TIMED))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_TIMED + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize(device)
    milliseconds: list[float] = [first.elapsed_time(last) for first, last in itertools.pairwise(marks)]
    return statistics.median(milliseconds) / 1e3


def _wall_seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@dataclass(frozen=True)
class GemmShape:
    """One linear layer on one batch, and which of its gradients are computed."""

    M: int
    K: int
    N: int
    input_gradient: bool
    weight_gradient: bool

    def same_layer(self, other: GemmShape) -> bool:
        """Whether only the number of rows differs."""
        return (self.K, self.N) == (other.K, other.N) and self._gradients == other._gradients

    @property
    def _gradients(self) -> tuple[bool, bool]:
        return self.input_gradient, self.weight_gradient


@dataclass(frozen=True)
class GemmTiming:
    """Seconds of forward and backward of one shape in the policy's precision and in FP8, the layer's casts included."""

    shape: GemmShape
    high_precision_s: float
    fp8_s: float

    @property
    def speedup(self) -> float:
        return self.high_precision_s / self.fp8_s


@dataclass
class GemmTable:
    """Timings with what they hold for.

    Attributes:
        device: its name, as the driver gives it.
        kernel: of the FP8 products.
        dtype: of the products in the policy's precision.
        timings: one a shape.
    """

    device: str
    kernel: str
    dtype: str
    timings: list[GemmTiming] = field(default_factory=list)

    def nearest(self, shape: GemmShape) -> GemmTiming | None:
        """The timing of this shape, else of the same layer with the nearest number of rows; None for another layer."""
        known = [timing for timing in self.timings if timing.shape.same_layer(shape)]
        return min(known, key=lambda timing: abs(timing.shape.M - shape.M), default=None)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> GemmTable:
        """Read what ``save`` wrote.

        Raises:
            ValueError: no such file, or not such a table.
        """
        try:
            record = json.loads(Path(path).read_text())
            timings = [GemmTiming(GemmShape(**t.pop("shape")), **t) for t in record.pop("timings")]
            return cls(**record, timings=timings)
        except (OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"gemm_gate.table={path} is no table of timed products ({type(error).__name__}: {error}). Name the "
                "gemm_gate.json of a run's folder, or leave it out to have the products timed."
            ) from error


class GemmGate:
    """Decides layer by layer, on the layer's first batch.

    Args:
        device: that the layers compute on.
        kernel: of the FP8 products.
        threshold: FP8 is kept where it is more than this many times as fast.
        table: a file of timings to decide by, instead of timing.
        clock: measures a call.

    Attributes:
        table: what was timed or read.

    Raises:
        ValueError: a threshold that is not positive, or a table that can't be read or holds for something else.
    """

    def __init__(
        self,
        device: torch.device,
        kernel: str,
        *,
        threshold: float = 1.0,
        table: Path | str | None = None,
        clock: Clock = seconds_a_call,
    ) -> None:
        if not threshold > 0:
            raise ValueError(f"gemm_gate.threshold is a ratio of times above 0; got {threshold}.")
        self.threshold = threshold
        self.device, self._kernel, self._clock = device, kernel, clock
        self.source = None if table is None else str(table)
        self.table: GemmTable | None = None if table is None else self._read(table)

    def keeps(self, layer: nn.Linear, fp8_layer: nn.Module, input_MK: Tensor) -> tuple[bool, GemmTiming]:
        """Whether the FP8 layer is faster on this input, and the timing that says so.

        On several processes the first one's timing decides for all, so that all compute alike.

        Raises:
            ValueError: a table that was read has no such layer.
        """
        shape = GemmShape(
            M=input_MK.numel() // input_MK.shape[-1],
            K=layer.in_features,
            N=layer.out_features,
            input_gradient=input_MK.requires_grad,
            weight_gradient=layer.weight.requires_grad,
        )
        timing = _of_first_process(self._timing(shape, layer, fp8_layer, input_MK))
        return timing.speedup > self.threshold, timing

    def describe(self) -> dict[str, Any]:
        """The decisions, for reports."""
        return {
            "threshold": self.threshold,
            "table_read_from": self.source,
            **({} if self.table is None else {key: getattr(self.table, key) for key in ("device", "kernel", "dtype")}),
            "shapes": [
                {
                    **asdict(timing.shape),
                    "high_precision_ms": 1e3 * timing.high_precision_s,
                    "fp8_ms": 1e3 * timing.fp8_s,
                    "speedup": timing.speedup,
                    "kept": timing.speedup > self.threshold,
                }
                for timing in (self.table.timings if self.table else [])
            ],
        }

    def _timing(self, shape: GemmShape, layer: nn.Linear, fp8_layer: nn.Module, input_MK: Tensor) -> GemmTiming:
        dtype = str(_product_dtype(layer.weight, self.device))
        if self.table is None:
            self.table = GemmTable(_device_name(self.device), self._kernel, dtype)
        known = self.table.nearest(shape)
        if self.source is not None:
            self._require_known(shape, known, dtype)
        if known is not None and (self.source is not None or known.shape == shape):
            return known
        timing = GemmTiming(shape, self._time(layer, input_MK), self._time(fp8_layer, input_MK))
        self.table.timings.append(timing)
        return timing

    def _time(self, layer: nn.Module, input_MK: Tensor) -> float:
        """Seconds of forward and backward, in a thread of its own.

        There, neither autograd hooks nor dispatch modes of the caller (gradient checkpointing, a FLOP counter) see the
        calls; only its autocast is taken along.
        """
        autocast = torch.is_autocast_enabled(self.device.type), torch.get_autocast_dtype(self.device.type)
        x_MK = input_MK.detach().requires_grad_(input_MK.requires_grad)
        wanted = [tensor for tensor in (x_MK, *layer.parameters()) if tensor.requires_grad]

        def run() -> None:
            with torch.autocast(self.device.type, enabled=autocast[0], dtype=autocast[1]):
                out_MN = layer(x_MK)
            if wanted:
                torch.autograd.grad(out_MN, wanted, torch.ones_like(out_MN))

        def measure() -> float:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                return self._clock(run, self.device)

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(measure).result()

    def _read(self, path: Path | str) -> GemmTable:
        table, device = GemmTable.load(path), _device_name(self.device)
        if (table.device, table.kernel) != (device, self._kernel):
            raise ValueError(
                f"gemm_gate.table={path} was timed for {table.kernel} on {table.device}; this run computes with "
                f"{self._kernel} on {device}. Leave the table out, or delete a resumed run's own, to have the "
                "products timed."
            )
        return table

    def _require_known(self, shape: GemmShape, known: GemmTiming | None, dtype: str) -> None:
        assert self.table is not None
        if known is None or self.table.dtype != dtype:
            raise ValueError(
                f"gemm_gate.table={self.source} has {self.table.dtype} timings of (K, N) "
                f"{sorted({(t.shape.K, t.shape.N) for t in self.table.timings})}; this run has {shape} in {dtype}. "
                "Leave the table out to have the products timed."
            )


def _product_dtype(weight: Tensor, device: torch.device) -> torch.dtype:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight.dtype


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _of_first_process(timing: GemmTiming) -> GemmTiming:
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return timing
    box: list[Any] = [timing]
    dist.broadcast_object_list(box, src=0)
    first: GemmTiming = box[0]
    return first


def gate_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The ``gemm_gate`` node of a precision's options, checked.

    Raises:
        ValueError: an unknown key.
    """
    known = {"enabled", "threshold", "table"}
    unknown = sorted(set(options or {}) - known)
    if unknown:
        raise ValueError(f"gemm_gate has the options {', '.join(sorted(known))}; got {', '.join(unknown)}.")
    return dict(options or {})


def gate_for(
    kernel: str, device: torch.device, options: Mapping[str, Any], own_table: Path | None = None
) -> GemmGate | None:
    """The gate that ``gate_options`` ask for; None where they set ``enabled`` to false.

    Args:
        own_table: of a resumed run, which decides where the options name no table.

    Raises:
        ValueError: as :class:`GemmGate`.
    """
    chosen = {name: value for name, value in options.items() if name != "enabled"}
    chosen["table"] = chosen.get("table") or own_table
    return GemmGate(device, kernel, **chosen) if options.get("enabled", True) else None
