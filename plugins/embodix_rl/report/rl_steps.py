# SPDX-License-Identifier: Apache-2.0
"""Training steps of a reinforcement-learning run, one JSON object a line, and the rates that follow from them.

A frame is an action step of one environment. Rates count *fresh* frames, those that no earlier step had trained on:
optimizer steps and trained frames also count data that is used again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from embodix.report.steps import append_line, read_lines


@dataclass(frozen=True)
class RlStep:
    """One training step.

    Attributes:
        step: its number.
        begin_s: Unix time at which the step before was done (for the first: at which the run began to train).
        end_s: Unix time at which it was done.
        frames: trained on.
        fresh_frames: of those, for the first time.
        received: trajectories that the training processes received, 0 where they are not counted.
        staleness: age in policy versions -> frames trained on.
        declared_latency: environment and policy took declared times: the rates are of a schedule, not of a simulator.
        metrics: the host's metrics.
    """

    step: int
    begin_s: float
    end_s: float
    frames: int
    fresh_frames: int
    received: int
    staleness: dict[int, int]
    declared_latency: bool
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RlRates:
    """Rates after warm-up.

    Attributes:
        num_steps: training steps that were counted.
        seconds: that they took.
        fresh_frames_per_s: fresh frames a second.
        trained_frames_per_s: all frames a second, data that is used again included.
        reuse: frames trained on for each fresh one; 1 when nothing is used twice.
        staleness: age in policy versions -> share of the frames.
        declared_latency: as in the steps.
    """

    num_steps: int
    seconds: float
    fresh_frames_per_s: float
    trained_frames_per_s: float
    reuse: float
    staleness: dict[int, float]
    declared_latency: bool


def append_rl_step(path: Path | str, step: RlStep) -> None:
    """Add a step to a run's records."""
    append_line(path, asdict(step), _decode)


def amend_rl_step(path: Path | str, step: int, metrics: Mapping[str, float]) -> None:
    """Add metrics to a step that was recorded before.

    Raises:
        ValueError: it was not.
    """
    steps = read_rl_steps(path)
    if step not in [one.step for one in steps]:
        raise ValueError(f"{path} has no step {step}; it has {[one.step for one in steps]}.")
    amended = [replace(one, metrics={**one.metrics, **metrics}) if one.step == step else one for one in steps]
    beside = Path(path).with_suffix(".part")
    beside.unlink(missing_ok=True)
    for one in amended:
        append_rl_step(beside, one)
    beside.replace(path)


def read_rl_steps(path: Path | str) -> list[RlStep]:
    """All steps of a run.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line that is no step.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"No {path}; `lerobot rl` writes metrics.jsonl into its run folder.")
    return read_lines(path, _decode, "a training step of `lerobot rl`")


def rates(steps: Sequence[RlStep], warmup_steps: int) -> RlRates:
    """Rates without the first steps.

    Raises:
        ValueError: no step after warm-up.
    """
    counted = steps[warmup_steps:]
    if not counted:
        raise ValueError(
            f"{len(steps)} training steps are none after {warmup_steps} of warm-up; run more (rl.steps) or lower "
            "rl.warmup_steps."
        )
    seconds = counted[-1].end_s - counted[0].begin_s
    frames, fresh = sum(step.frames for step in counted), sum(step.fresh_frames for step in counted)
    ages: Counter[int] = Counter()
    for step in counted:
        ages.update(step.staleness)
    total = max(sum(ages.values()), 1)
    return RlRates(
        num_steps=len(counted),
        seconds=seconds,
        fresh_frames_per_s=fresh / seconds,
        trained_frames_per_s=frames / seconds,
        reuse=frames / fresh if fresh else float("inf"),
        staleness={age: count / total for age, count in sorted(ages.items())},
        declared_latency=counted[0].declared_latency,
    )


def _decode(line: bytes) -> RlStep:
    fields = json.loads(line)
    staleness = {int(age): count for age, count in fields.pop("staleness").items()}
    return RlStep(**fields, staleness=staleness)
