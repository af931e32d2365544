# SPDX-License-Identifier: Apache-2.0
"""The clock gives each stretch of a step to the phase that just ended, and nothing between steps to any."""

from __future__ import annotations

import pytest
import torch

from embodix.report.steps import PHASES
from embodix.training import accelerator
from embodix.training.accelerator import StepClock


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test moves: CPU time runs at half the speed of wall time."""
    now = [0.0]
    monkeypatch.setattr(accelerator.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(accelerator.time, "process_time", lambda: now[0] / 2)
    return now


def test_phases_add_up_to_the_step(seconds: list[float]) -> None:
    clock = StepClock(torch.device("cpu"))
    clock.start()
    for duration, phase in zip((1.0, 2.0, 3.0, 4.0, 5.0), PHASES, strict=True):
        seconds[0] += duration
        clock.end(phase)
    clock.stop()
    assert clock.wall_s == dict(zip(PHASES, (1.0, 2.0, 3.0, 4.0, 5.0), strict=True))
    assert clock.cpu_s == {phase: wall / 2 for phase, wall in clock.wall_s.items()}


def test_time_between_steps_belongs_to_none(seconds: list[float]) -> None:
    clock = StepClock(torch.device("cpu"))
    clock.start()
    clock.stop()
    seconds[0] += 100.0  # a checkpoint, an evaluation, another variant's turn
    clock.end("optimizer")
    assert not clock.running
    clock.start()
    seconds[0] += 1.0
    clock.end("data_wait")
    assert clock.wall_s["data_wait"] == 1.0
    assert clock.wall_s["optimizer"] == 0.0
