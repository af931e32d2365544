# SPDX-License-Identifier: Apache-2.0
"""Time the first bins of a run and fit the packer's cost model to them."""

from __future__ import annotations

import time

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from embodix.packing.sample_cost import CostModel, IntArray, MeasuredBin, SampleSizes, fit_cost

NUM_WARMUP = 2


class CostFit:
    """Measures the bins of ``num_steps`` steps after warm-up, then fits.

    A bin's time is that of its forward and backward; of its forward alone where several processes wait for each other
    in the backward.

    Args:
        num_steps: steps to measure.
        sizes: of every sample.

    Attributes:
        measured: bins of this process so far.
    """

    def __init__(self, num_steps: int, sizes: SampleSizes, accelerator: Accelerator) -> None:
        self.measured: list[MeasuredBin] = []
        self._num_steps, self._sizes, self._accelerator = num_steps, sizes, accelerator
        self._seen_steps = 0
        self._seconds: list[float] = []
        self._started: float | None = None

    def bin_started(self) -> None:
        self._started = self._now()

    def forward_ended(self) -> None:
        if self._accelerator.num_processes > 1:
            self._stop()

    def bin_ended(self) -> None:
        self._stop()

    def step_ended(self, bins: list[IntArray]) -> CostModel | None:
        """Keep the step's bins; the fitted model after the last step, None before it or where nothing fits.

        The fit is over the bins of all processes, each of which gets the same model.
        """
        if self._seen_steps >= NUM_WARMUP:
            timed = zip(bins, self._seconds, strict=True)
            self.measured += [MeasuredBin.of(samples, self._sizes, seconds) for samples, seconds in timed]
        self._seconds = []
        self._seen_steps += 1
        return fit_cost(self._everyones()) if self.finished else None

    @property
    def finished(self) -> bool:
        """Whether every step that is measured has been."""
        return self._seen_steps >= NUM_WARMUP + self._num_steps

    def _everyones(self) -> list[MeasuredBin]:
        if self._accelerator.num_processes == 1:
            return self.measured
        return list(gather_object(self.measured))

    def _stop(self) -> None:
        if self._started is not None:
            self._seconds.append(self._now() - self._started)
            self._started = None

    def _now(self) -> float:
        if self._accelerator.device.type == "cuda":
            torch.cuda.synchronize(self._accelerator.device)
            return time.perf_counter()
        return time.process_time()
