# SPDX-License-Identifier: Apache-2.0
"""What the variants of `lerobot bench rl` made of the same work, from the folders of their runs.

The times of the parts are seconds that a frame takes of a component that does nothing else: environments and inference
of a generated frame, training of a trained one. The bound is the largest of them, each as small as any variant of the
same baseline had it; with everything overlapped no schedule of these parts is faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from embodix.report.manifest import Manifest, load_manifest
from embodix_rl.report.rl_steps import RlRates, RlStep, rates, read_rl_steps
from embodix_rl.report.spans import (
    ENVIRONMENTS,
    INFER,
    INFERENCE,
    RESET,
    STEP,
    TRAIN,
    TRAINING,
    Span,
    busy_s,
    component_of,
    component_shares,
    pieces,
    read_timeline,
    shares,
)

PART_ACTIVITIES = {ENVIRONMENTS: (STEP, RESET), INFERENCE: (INFER,), TRAINING: (TRAIN,)}
PROGRESS = {  # what an environment tells of its episodes, in RLinf's names
    "success": ("eval/success_once", "env/success_once"),
    "return": ("eval/return", "env/return"),
}


@dataclass(frozen=True)
class VariantEntry:
    """A variant as it was run.

    Attributes:
        name: of the variant.
        folder: of its run.
        overrides: of `lerobot rl`.
        baseline: the variant that it is compared with; None for a baseline.
        predicted_frames_per_s: fresh frames a second of the scheduling model, where it knows the schedule.
        paper_ratio: to the baseline, of a paper.
        failure: what it ended with, in a sentence; None where it was finished.
        last_lines: of its output, where it failed.
        reused: it had been finished by an earlier bench.
    """

    name: str
    folder: Path
    overrides: list[str]
    baseline: str | None = None
    predicted_frames_per_s: float | None = None
    paper_ratio: float | None = None
    failure: str | None = None
    last_lines: list[str] = field(default_factory=list)
    reused: bool = False


@dataclass(frozen=True)
class VariantResult:
    """A finished variant.

    Attributes:
        entry: how it was run.
        manifest: of its run.
        steps: all its training steps.
        warmup_steps: of these, left out of rates and times.
        rates: after warm-up.
        spans: of its whole timeline.
        shares: of the time after warm-up: worker -> activity or ``waits for ...`` -> share.
        parts_s: component -> seconds a frame, of that component alone.
        discarded_share: of the frames of finished trajectories, those never trained on.
        bound_frames_per_s: of the parts at their best among the variants of its baseline.
        ratio: of fresh frames a second to the baseline; None without one.
        predicted_ratio: as the scheduling model has it.
    """

    entry: VariantEntry
    manifest: Manifest
    steps: list[RlStep]
    warmup_steps: int
    rates: RlRates
    spans: list[Span]
    shares: dict[str, dict[str, float]]
    parts_s: dict[str, float]
    discarded_share: float
    bound_frames_per_s: float = 0.0
    ratio: float | None = None
    predicted_ratio: float | None = None

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def counted(self) -> list[RlStep]:
        """The steps after warm-up."""
        return self.steps[self.warmup_steps :]

    @property
    def bound_share(self) -> float:
        """Of the bound, what was reached."""
        return self.rates.fresh_frames_per_s / self.bound_frames_per_s

    @property
    def components(self) -> dict[str, dict[str, float]]:
        """The mean of `shares` over a component's workers."""
        return component_shares(self.shares)

    def progress(self) -> dict[str, list[tuple[int, float, float]]]:
        """Of each measure of success: fresh frames so far, seconds since training began, value. Never-moving zeros,
        as of an environment that knows no success, are left out."""
        curves = {}
        for label, names in PROGRESS.items():
            name = next((name for name in names if any(name in step.metrics for step in self.steps)), None)
            points = self._points(name) if name else []
            if any(value for _, _, value in points):
                curves[f"{label} ({'evaluation' if str(name).startswith('eval') else 'while training'})"] = points
        return curves

    def _points(self, name: str) -> list[tuple[int, float, float]]:
        frames, points, begun = 0, [], self.steps[0].begin_s
        for step in self.steps:
            frames += step.fresh_frames
            if name in step.metrics:
                points.append((frames, step.end_s - begun, step.metrics[name]))
        return points


@dataclass(frozen=True)
class BenchReport:
    """All variants of a bench.

    Attributes:
        title: of the report.
        results: the finished variants, in the order in which they ran.
        failures: the others.
        paper_source: where the paper's ratios stand.
        timeline_s: seconds of the timelines; None for two training steps of the first variant.
    """

    title: str
    results: list[VariantResult]
    failures: list[VariantEntry]
    paper_source: str | None = None
    timeline_s: float | None = None

    def of(self, name: str | None) -> VariantResult | None:
        """The finished variant of a name."""
        return next((result for result in self.results if result.name == name), None)

    @property
    def declared_latency(self) -> bool:
        """Whether times were declared."""
        return any(result.rates.declared_latency for result in self.results)


def read_bench(title: str, entries: Sequence[VariantEntry], **shown: Any) -> BenchReport:
    """Read the folders of all variants that did not fail, and compare them.

    Args:
        entries: in the order in which they ran.
        shown: ``paper_source``, ``timeline_s`` of the report.

    Raises:
        FileNotFoundError, ValueError: the records of a finished run are missing or damaged.
    """
    alone = [read_variant(entry) for entry in entries if entry.failure is None]
    by_name = {result.name: result for result in alone}
    results = [_compared(result, by_name) for result in alone]
    return BenchReport(title, results, [entry for entry in entries if entry.failure is not None], **shown)


def read_variant(entry: VariantEntry) -> VariantResult:
    """One finished run by itself.

    Raises:
        FileNotFoundError, ValueError: its records are missing or damaged, or no step came after warm-up.
    """
    manifest, steps = load_manifest(entry.folder / "manifest.json"), read_rl_steps(entry.folder / "metrics.jsonl")
    warmup = int(manifest.config["rl"]["warmup_steps"])
    counted_rates, counted = rates(steps, warmup), steps[warmup:]
    spans = read_timeline(entry.folder / "timeline")
    begin, end = counted[0].begin_s, counted[-1].end_s
    sizes = manifest.settings["sizes"]
    return VariantResult(
        entry=entry,
        manifest=manifest,
        steps=steps,
        warmup_steps=warmup,
        rates=counted_rates,
        spans=spans,
        shares=shares(pieces(spans, begin, end)),
        parts_s=_parts(spans, counted, sizes),
        discarded_share=_discarded_share(spans, steps, sizes),
    )


def _compared(result: VariantResult, by_name: Mapping[str, VariantResult]) -> VariantResult:
    group = [other for other in by_name.values() if _baseline_name(other) == _baseline_name(result)]
    bound_s = max(min(other.parts_s[part] for other in group) for part in PART_ACTIVITIES)
    baseline = by_name.get(result.entry.baseline or "")
    predicted, ratio = None, None
    if baseline is not None:
        ratio = result.rates.fresh_frames_per_s / baseline.rates.fresh_frames_per_s
        own, other = result.entry.predicted_frames_per_s, baseline.entry.predicted_frames_per_s
        predicted = own / other if own and other else None
    return replace(result, bound_frames_per_s=1 / bound_s, ratio=ratio, predicted_ratio=predicted)


def _baseline_name(result: VariantResult) -> str:
    return result.entry.baseline or result.name


def frames_of_a_step(sizes: Mapping[str, Any]) -> int:
    """Frames that one recorded step of a worker gives: those of a stage's environments, for a chunk."""
    return int(sizes["num_envs"] // (sizes["env_workers"] * sizes["num_stages"]) * sizes["chunk"])


def _parts(spans: Sequence[Span], counted: Sequence[RlStep], sizes: Mapping[str, Any]) -> dict[str, float]:
    begin, end = counted[0].begin_s, counted[-1].end_s
    generated = frames_of_a_step(sizes) * sum(
        begin < span.end_s <= end and span.activity == STEP for span in spans if not span.is_wait
    )
    frames = {ENVIRONMENTS: generated, INFERENCE: generated, TRAINING: sum(step.frames for step in counted)}
    workers = {
        ENVIRONMENTS: sizes["env_workers"], INFERENCE: sizes["rollout_workers"], TRAINING: sizes["actor_workers"]
    }  # fmt: skip
    parts = {}
    for component, activities in PART_ACTIVITIES.items():
        own = [span for span in spans if component_of(span.worker) == component and span.activity in activities]
        seconds = sum(busy_s(own, begin, end).values())
        if not frames[component] or not seconds:
            raise ValueError(f"The timeline has no {' or '.join(activities)} after warm-up; run more steps (rl.steps).")
        parts[component] = seconds / workers[component] / frames[component]
    return parts


def _discarded_share(spans: Sequence[Span], steps: Sequence[RlStep], sizes: Mapping[str, Any]) -> float:
    """Of the frames of finished trajectories, those that no step trained on.

    What was under way or waiting when the last step with fresh frames began was not thrown away: only whole
    trajectories that were finished by then count.
    """
    last = next(step for step in reversed(steps) if step.fresh_frames)
    steps_a_round = sizes["num_stages"] * sizes["steps_per_epoch"] // sizes["chunk"]
    trains = [span for span in spans if span.activity == TRAIN and span.begin_s < last.end_s]
    at = max((span.begin_s for span in trains), default=last.end_s)
    done = Counter(span.worker for span in spans if span.activity == STEP and span.end_s <= at)
    generated = sum(count // steps_a_round * steps_a_round for count in done.values()) * frames_of_a_step(sizes)
    trained = sum(step.fresh_frames for step in steps)
    return max(0.0, 1 - trained / generated) if generated else 0.0
