# SPDX-License-Identifier: Apache-2.0
"""A learning-rate schedule that advances by samples, so that it means the same whatever a step holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class SampleSchedule:
    """Advances a scheduler once for every ``samples_a_step`` samples: not at all, once or several times a step.

    Args:
        scheduler: the scheduler that accelerate prepared.
        samples_a_step: ``train.batch_size`` x processes, what a step of upstream holds.
        step_samples: samples of the step that was just trained.
        since_last: samples trained since the scheduler last advanced.
    """

    def __init__(
        self, scheduler: Any, samples_a_step: int, step_samples: Callable[[], int], since_last: int = 0
    ) -> None:
        self.scheduler = scheduler
        self.since_last = since_last
        self._samples_a_step = samples_a_step
        self._step_samples = step_samples

    def step(self) -> None:
        """Called by upstream's loop once an optimizer step."""
        self.since_last += self._step_samples()
        while self.since_last >= self._samples_a_step:
            self.scheduler.step()
            self.since_last -= self._samples_a_step

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
