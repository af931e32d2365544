# SPDX-License-Identifier: Apache-2.0
"""Split each training step into phases, in process CPU time and wall time.

The marks are set where upstream's loop calls its accelerator and its loader, so the loop itself is untouched.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from embodix.report.steps import PHASES


@dataclass
class StepClock:
    """Accumulates the time between marks into the phase that just ended.

    Attributes:
        synchronize: wait for the device before reading the clock, so that GPU phases are exact.
    """

    device: torch.device
    synchronize: bool = False
    cpu_s: dict[str, float] = field(default_factory=dict)
    wall_s: dict[str, float] = field(default_factory=dict)
    _last: tuple[float, float] | None = None

    @property
    def running(self) -> bool:
        return self._last is not None

    def start(self) -> None:
        """Begin a step: the time until the first :meth:`end` belongs to that phase."""
        self.cpu_s = dict.fromkeys(PHASES, 0.0)
        self.wall_s = dict.fromkeys(PHASES, 0.0)
        self._last = self._read()

    def end(self, phase: str) -> None:
        """The time since the last mark was spent in ``phase``."""
        if self._last is None:
            return
        now = self._read()
        self.cpu_s[phase] += now[0] - self._last[0]
        self.wall_s[phase] += now[1] - self._last[1]
        self._last = now

    def stop(self) -> None:
        self._last = None

    def _read(self) -> tuple[float, float]:
        if self.synchronize and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.process_time(), time.perf_counter()
