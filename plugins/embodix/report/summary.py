# SPDX-License-Identifier: Apache-2.0
"""One variant of a comparison in figures: means over its timed steps."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from embodix.report.evaluation import Evaluation
from embodix.report.precision import precision_words
from embodix.report.runs import Run
from embodix.report.steps import PHASES, StepRecord


@dataclass(frozen=True)
class VariantSummary:
    """One variant over its measured steps; times in seconds a step, counts a sample, memory in bytes."""

    name: str
    num_steps: int
    num_warmup: int
    batch_size: float
    wall_s: dict[str, float]
    cpu_s: dict[str, float]
    samples_per_wall_s: float
    samples_per_cpu_s: float
    data_wait_share: float
    final_loss: float
    packer: str | None
    composed: bool
    attention: str | None
    precision: str
    patches: list[str]
    fallbacks: list[str]
    tokens_valid: float | None
    tokens_computed: float | None
    tokens_upstream: float | None
    images_computed: float | None
    images_upstream: float | None
    utilisation: float | None
    action_pad_share: float | None
    flops_per_step: float | None
    peak_memory_bytes: int | None
    peak_memory_source: str | None
    num_parameters: int | None
    evaluation: Evaluation | None


def summarise(run: Run, num_warmup: int | None = None) -> VariantSummary:
    """Means of one run over its timed steps."""
    measured = timed_steps(run, num_warmup)
    num_samples = sum(step.num_samples for step in measured)
    wall_s, cpu_s = _phase_means(measured, "wall_s"), _phase_means(measured, "cpu_s")
    wall_total, cpu_total = (sum(map(total_time, [getattr(s, k) for s in measured])) for k in ("wall_s", "cpu_s"))
    manifest = run.manifest
    return VariantSummary(
        name=run.name,
        num_steps=len(run.steps),
        num_warmup=len(run.steps) - len(measured),
        batch_size=num_samples / len(measured),
        wall_s=wall_s,
        cpu_s=cpu_s,
        samples_per_wall_s=divide(num_samples, wall_total),
        samples_per_cpu_s=divide(num_samples, cpu_total),
        data_wait_share=divide(sum(s.wall_s.get("data_wait", 0.0) for s in measured), wall_total),
        final_loss=statistics.fmean(step.loss for step in run.steps[-max(1, len(run.steps) // 10) :]),
        packer=manifest.packer,
        composed="composition" in manifest.settings,
        attention=manifest.attention,
        precision=precision_words(run),
        patches=manifest.patches,
        fallbacks=manifest.fallbacks,
        **_token_means(measured),
        action_pad_share=_action_pad_share(measured),
        flops_per_step=manifest.flops_per_step,
        peak_memory_bytes=manifest.peak_memory_bytes,
        peak_memory_source=manifest.peak_memory_source,
        num_parameters=manifest.num_parameters,
        evaluation=run.evaluation,
    )


def with_counts_of(baseline: VariantSummary, variants: Sequence[VariantSummary]) -> VariantSummary:
    """An unchanged baseline with the counts that it has no way to take itself.

    A variant on the same samples knows what upstream computes for them; nothing is filled in where the baseline
    counted, packs, or saw other steps.
    """
    same = [v for v in variants if v.num_steps == baseline.num_steps and not v.composed]
    counted = next((v for v in same if v.tokens_upstream is not None), None)
    if baseline.tokens_computed is not None or baseline.packer not in (None, "none") or counted is None:
        return baseline
    valid, upstream = counted.tokens_valid, counted.tokens_upstream
    return dataclasses.replace(
        baseline,
        tokens_valid=valid,
        tokens_computed=upstream,
        tokens_upstream=upstream,
        images_computed=counted.images_upstream,
        images_upstream=counted.images_upstream,
        utilisation=divide(valid or 0.0, upstream or 0.0),
        action_pad_share=counted.action_pad_share if baseline.action_pad_share is None else baseline.action_pad_share,
    )


def timed_steps(run: Run, num_warmup: int | None = None) -> list[StepRecord]:
    """The steps whose time counts: without warm-up, and without the step that carried torch's FLOP counter.

    Raises:
        ValueError: no step is left.
    """
    if num_warmup is None:
        num_warmup = min(5, max(1, len(run.steps) // 10)) if len(run.steps) > 2 else 0
    counted = (run.manifest.config.get("step_clock") or {}).get("count_flops_at")
    timed = [step for step in run.steps[num_warmup:] if step.step != counted]
    if not timed:
        raise ValueError(
            f"A comparison needs steps after the {num_warmup} of warm-up; {run.name!r} trained {len(run.steps)}. "
            "Train more steps or lower num_warmup_steps."
        )
    return timed


def total_time(times: Mapping[str, float]) -> float:
    return sum(times.values())


def _phase_means(steps: Sequence[StepRecord], clock: str) -> dict[str, float]:
    return {phase: statistics.fmean(getattr(step, clock).get(phase, 0.0) for step in steps) for phase in PHASES}


def _token_means(steps: Sequence[StepRecord]) -> dict[str, float | None]:
    """Token and image counts a sample, and the share of computed tokens that carry input."""
    names = ("valid", "computed", "upstream", "images_computed", "images_upstream")
    keys = ("tokens_valid", "tokens_computed", "tokens_upstream", "images_computed", "images_upstream")
    counted = [step for step in steps if step.tokens is not None]
    if not counted:
        return dict.fromkeys((*keys, "utilisation"))
    num_samples = sum(step.num_samples for step in counted)
    sums = {name: sum(getattr(step.tokens, name) for step in counted) for name in names}
    means: dict[str, float | None] = {key: sums[name] / num_samples for key, name in zip(keys, names, strict=True)}
    return {**means, "utilisation": divide(sums["valid"], sums["computed"])}


def _action_pad_share(steps: Sequence[StepRecord]) -> float | None:
    valid = [step.action_valid for step in steps if step.action_valid is not None and step.action_total is not None]
    total = [step.action_total for step in steps if step.action_valid is not None and step.action_total is not None]
    return 1 - sum(valid) / sum(total) if total else None


def divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
