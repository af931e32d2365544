# SPDX-License-Identifier: Apache-2.0
"""Runs as `lerobot train` leaves them: one folder, variants of a comparison, jobs of a sweep, and each in figures."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from embodix.report.evaluation import RESULTS_FILE, Evaluation, read_evaluation
from embodix.report.manifest import Manifest, load_manifest
from embodix.report.ranks import RanksSummary
from embodix.report.steps import PHASES, StepRecord, read_steps

VARIANTS_FOLDER, EVALUATION_FOLDER = "variants", "evaluation"


@dataclass(frozen=True)
class Run:
    """One trained variant: its name in the report, folder, manifest, steps and (if evaluated) success."""

    name: str
    folder: Path
    manifest: Manifest
    steps: list[StepRecord]
    evaluation: Evaluation | None


def read_run(folder: Path | str, name: str | None = None, results: Path | None = None) -> Run:
    """Read one run folder (``manifest.json``, ``steps.jsonl``).

    Args:
        name: the variant's name in the report; default: the manifest's.
        results: ``results.json`` of its evaluation; there need not be one.

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged; the message names it.
    """
    folder = Path(folder)
    manifest = load_manifest(folder / "manifest.json")
    steps = read_steps(folder / "steps.jsonl")
    if not steps:
        raise ValueError(f"{folder / 'steps.jsonl'} must hold at least one step; got none. Train the run first.")
    return Run(name or manifest.variant, folder, manifest, steps, read_evaluation(results) if results else None)


def read_variants(folder: Path | str) -> list[Run]:
    """Read every run of a comparison folder (``<folder>/variants/<name>``), in the order they were made.

    The evaluation of each is in ``<folder>/evaluation/<name>/results.json``.

    Raises:
        FileNotFoundError: no such runs.
    """
    runs_folder = Path(folder) / VARIANTS_FOLDER
    names = [path.parent.name for path in runs_folder.glob("*/manifest.json")]
    evaluated = Path(folder) / EVALUATION_FOLDER
    found = [read_run(runs_folder / name, name, evaluated / name / RESULTS_FILE) for name in names]
    if not found:
        raise FileNotFoundError(
            f"A comparison needs run folders in {runs_folder}/<variant>/; got none. "
            "Run `lerobot compare`, which trains the variants and writes them there."
        )
    return sorted(found, key=lambda run: (run.manifest.created_at, run.name))


def read_sweep(folder: Path | str) -> list[Run]:
    """The finished runs below ``folder`` in the order of their job numbers, named by what was swept."""
    manifests = [path for path in Path(folder).rglob("manifest.json") if (path.parent / "steps.jsonl").is_file()]
    runs = [read_run(path.parent) for path in sorted(manifests, key=_natural_order)]
    overrides = [_overrides(run.folder, Path(folder)) for run in runs]
    shared = set.intersection(*map(set, overrides)) if overrides else set()
    named = [" ".join(o for o in own if o not in shared) or run.name for run, own in zip(runs, overrides, strict=True)]
    return [
        dataclasses.replace(run, name=name if named.count(name) == 1 else f"{name} ({_job(run.folder, Path(folder))})")
        for run, name in zip(runs, named, strict=True)
    ]


def _overrides(run_folder: Path, sweep_folder: Path) -> list[str]:
    """The overrides that Hydra recorded for the job this run belongs to; empty where it recorded none."""
    for folder in (run_folder, *run_folder.parents):
        recorded = folder / ".hydra" / "overrides.yaml"
        if recorded.is_file():
            return [str(override) for override in yaml.safe_load(recorded.read_text()) or []]
        if folder == sweep_folder:
            break
    return []


def _job(run_folder: Path, sweep_folder: Path) -> str:
    return run_folder.relative_to(sweep_folder).parts[0]


def _natural_order(path: Path) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in path.parts]


def low_precision(run: Run) -> Mapping[str, Any] | None:
    """The description of the training precision; None for matrix products in the policy's own."""
    described = run.manifest.settings.get("precision")
    return described if isinstance(described, Mapping) else None


def precision_words(run: Run) -> str:
    """Format, kernel and extent: ``FP4: emulated (21 of 21 layers)``."""
    described = low_precision(run)
    if described is None:
        return "the policy's own"
    name = described.get("format", {}).get("name", "low precision")
    extent = f"{len(described.get('converted', []))} of {described.get('num_language_layers', '?')} layers"
    return f"{name}: {described.get('kernel', 'kernel not recorded')} ({extent})"


def precision_terms(runs: Sequence[Run]) -> dict[str, str]:
    """What the runs' formats of low precision are, by name."""
    described = [low_precision(run) or {} for run in runs]
    return {term: text for one in described for term, text in one.get("format", {}).get("glossary", {}).items()}


@dataclass(frozen=True)
class ReferenceDifference:
    """Relative loss differences from what a variant is held to where upstream's own batch is wrong.

    Where upstream attends to the padding of shorter prompts, the loss of a batch depends on which samples happen to
    share it. A fast path that computes each sample alone can't agree with that, and should not: its reference is
    upstream run one sample at a time, on the same weights, samples, noise and times, measured once on a batch of the
    run.

    Attributes:
        reference: the reference in words, e.g. ``upstream run one sample at a time``.
        cause: why upstream's own batch is not the reference, one clause.
        variant: of the variant.
        host_batch: of upstream's own batch.
    """

    reference: str
    cause: str
    variant: float
    host_batch: float

    @classmethod
    def from_manifest(cls, recorded: Mapping[str, Any] | None) -> ReferenceDifference | None:
        """Read a manifest's ``reference_check``."""
        if recorded is None:
            return None
        return cls(
            reference=str(recorded["reference"]),
            cause=str(recorded["cause"]),
            variant=float(recorded["fast_difference"]),
            host_batch=float(recorded["host_batch_difference"]),
        )


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
    ranks: RanksSummary | None
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
        ranks=RanksSummary.from_settings(manifest.settings),
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
