# SPDX-License-Identifier: Apache-2.0
"""``metrics.jsonl`` of a run: one record a training step, written while RLinf logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from embodix_rl.report.rl_steps import RlStep, amend_rl_step, append_rl_step


class StepRecorder:
    """Stands among the loggers of RLinf's ``MetricLogger``: ``log(data, step)`` and ``finish()``.

    RLinf logs a step's metrics in several calls; they become one record when the next step's begin, or at the end.

    Args:
        path: of the records.
        consumption: asks the training processes what they trained on since the last call.
        declared: whether durations were declared (`env=latency`).
    """

    def __init__(self, path: Path, consumption: Callable[[], Mapping[str, Any]], *, declared: bool) -> None:
        self._path, self._consumption, self._declared = path, consumption, declared
        self._step: int | None = None
        self._values: dict[str, float] = {}
        self._counts: Mapping[str, Any] = {}
        self._begun_s = self._ended_s = time.time()

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """RLinf's call: metrics of a training step. Those of an earlier one (an evaluation) join its record."""
        if self._step is not None and step < self._step:
            amend_rl_step(self._path, step, {name: float(value) for name, value in data.items()})
            return
        if step != self._step:
            self.finish()
            self._step, self._counts = step, self._consumption()
            self._begun_s, self._ended_s = self._ended_s, time.time()
        self._values.update({name: float(value) for name, value in data.items()})

    def finish(self) -> None:
        """Write the step that is at hand."""
        if self._step is None:
            return
        record = RlStep(
            step=self._step,
            begin_s=self._begun_s,
            end_s=self._ended_s,
            declared_latency=self._declared,
            metrics=self._values,
            **self._counts,
        )
        append_rl_step(self._path, record)
        self._step, self._values = None, {}
