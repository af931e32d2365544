# SPDX-License-Identifier: Apache-2.0
"""Compare trained variants with a baseline: same function? how much faster? against which bound?

Nothing here is averaged away before it is paired: speed ratios and loss differences are taken step by step on the
same samples, then summarised. Times are means over the steps after warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from embodix.report.evaluation import PairedSuccess, pair_success
from embodix.report.ranks import RanksSummary
from embodix.report.runs import (
    ReferenceDifference,
    Run,
    VariantSummary,
    divide,
    low_precision,
    precision_words,
    summarise,
    timed_steps,
    total_time,
    with_counts_of,
)
from embodix.report.statistics import Spread, spread_of
from embodix.report.steps import PHASES, StepRecord

# Settings that say how a step is computed, watched or stored, not what is learned from which samples.
_HOW_NOT_WHAT = (
    *("attention", "packing", "vision_tokens", "patches", "plugin", "preprocessing", "reads", "strict_plugins"),
    *(
        "checkpoint",
        "parallel",
        "compare",
        "env",
        "eval",
        "evaluation",
        "logging",
        "output_dir",
        "resume",
        "step_clock",
    ),
    *("policy.compile_mode", "policy.compile_model", "policy.gradient_checkpointing"),
    *("train.eval_freq", "train.job_name", "train.log_freq", "train.num_workers", "train.output_dir"),
    *("train.save_checkpoint", "train.save_freq"),
)
DATA_WAIT_LIMIT = 0.15  # share of wall-clock time above which the data loader decides the speed
# Relative loss difference of the first step (same weights, same samples) that rounding alone explains.
ROUNDING = {"float32": 1e-6, "bfloat16": 2e-2}
LOW_PRECISION_ROUNDING = 2e-2
# Between parallel strategies a wrong gradient shows from the second step on: the largest difference of the first steps,
# as a multiple of the first one's tolerance.
STRATEGY_STEPS, STRATEGY_GROWTH = 5, 10


@dataclass(frozen=True)
class SpeedBound:
    """What the reduced work allows at most, as a ratio of floating-point operations against upstream.

    Attributes:
        this_size: FLOP ratio of the model and data that were run.
        real_size: FLOP ratio of the full-size model on the same prompts and cameras, or None.
        real_name: the full-size model in words, e.g. ``the large variant (4.1 B parameters, 224 px)``.
        basis: how the ratios were computed, one sentence.
    """

    this_size: float
    real_size: float | None = None
    real_name: str = "the full-size model"
    basis: str = ""


@dataclass(frozen=True)
class PairSummary:
    """A variant against the baseline, step by step on the same samples.

    Attributes:
        clock: what the ratios are measured by: ``process CPU time`` or ``wall-clock time`` (on a GPU).
        step_ratio: baseline time / variant time a sample, whole step.
        compute_ratio: the same for forward and backward alone, which the FLOP bound speaks of.
        samples_ratio: samples a second of the variant over the baseline's, by the same clock.
        same_samples: whether the steps of both hold the same samples. A packer that composes batches makes its own
            steps: losses are then not comparable step by step, and ratios are of the time a sample.
        first_loss_difference: relative, at the first common step, where the weights are still the same.
        largest_loss_difference: relative, over all common steps; ``largest_at_step`` says where.
        reference: the differences from the reference where upstream's own batch is not it, or None.
        same_function: whether the difference from the reference is rounding: from upstream's batch at the first step,
            or from ``reference`` where there is one; between parallel strategies also the difference of the first steps
            after it, ``early_difference``. Never where matrix products are computed in different precisions,
            nor where a loss is not finite: two broken runs have no function to compare.
        algorithm_changes: settings that change what is learned, and so may explain a difference.
        flop_ratio: baseline / variant of torch's counted FLOPs; None where one was not counted, or counts a rank's part
            of a sample.
        bound: the analytic bound, or None; also where both compute the same operations.
    """

    name: str
    clock: str
    num_common_steps: int
    step_ratio: Spread | None
    compute_ratio: Spread | None
    samples_ratio: float
    same_samples: bool
    first_loss_difference: float
    largest_loss_difference: float
    largest_at_step: int
    early_difference: float | None
    reference: ReferenceDifference | None
    same_function: bool
    tolerance: float
    algorithm_changes: list[str]
    flop_ratio: float | None
    bound: SpeedBound | None
    success: PairedSuccess | None


@dataclass(frozen=True)
class CompareReport:
    """Everything a reader needs; ``runs`` keeps the raw series for the plots."""

    title: str
    baseline: str
    variants: list[VariantSummary]
    pairs: list[PairSummary]
    warnings: list[str]
    config_differences: dict[str, dict[str, Any]]
    runs: list[Run] = field(repr=False)

    def variant(self, name: str) -> VariantSummary:
        return next(variant for variant in self.variants if variant.name == name)


def compare_runs(
    runs: Sequence[Run],
    *,
    baseline: str | None = None,
    bounds: Mapping[str, SpeedBound] | None = None,
    num_warmup: int | None = None,
    title: str = "Comparison of training variants",
) -> CompareReport:
    """Build the report of two or more runs.

    Args:
        baseline: name of the run that the others are compared with; default: ``upstream``, else the first run with
            upstream's packing, attention and precision, else the first.
        bounds: analytic bound by variant name.
        num_warmup: steps at the start whose time does not count; default: the first tenth, at most five.

    Raises:
        ValueError: fewer than two runs, a name twice, or a baseline that is not among them.
    """
    names = [run.name for run in runs]
    if len(runs) < 2 or len(set(names)) != len(names):
        raise ValueError(f"A comparison needs two or more runs with different names; got {', '.join(names) or 'none'}.")
    baseline = baseline or _default_baseline(runs)
    if baseline not in names:
        raise ValueError(f"The baseline must be one of the runs {', '.join(names)}; got {baseline!r}.")
    base = runs[names.index(baseline)]
    ordered = [base, *(run for run in runs if run is not base)]
    variants = [summarise(run, num_warmup) for run in ordered]
    variants[0] = with_counts_of(variants[0], variants[1:])
    pairs = [_pair(base, run, (bounds or {}).get(run.name), num_warmup) for run in ordered[1:]]
    return CompareReport(
        title=title,
        baseline=baseline,
        variants=variants,
        pairs=pairs,
        warnings=[*_warnings(variants, pairs), *uncounted_work(ordered)],
        config_differences=config_differences(ordered),
        runs=ordered,
    )


def _default_baseline(runs: Sequence[Run]) -> str:
    unchanged = [run.name for run in runs if _is_unchanged(run)]
    names = [run.name for run in runs]
    return "upstream" if "upstream" in names else (unchanged or names)[0]


def _is_unchanged(run: Run) -> bool:
    computes_as_upstream = run.manifest.packer == "none" and str(run.manifest.attention).startswith("upstream")
    return computes_as_upstream and low_precision(run) is None


def relative_difference(loss: float, reference: float) -> float:
    """|loss - reference| / |reference|; 0 where both are equal, infinite where one or both are not finite."""
    if not (math.isfinite(loss) and math.isfinite(reference)):
        return math.inf
    if loss == reference:
        return 0.0
    if reference == 0:
        return math.inf
    return abs(loss - reference) / abs(reference)


def common_steps(base: Run, run: Run) -> list[tuple[StepRecord, StepRecord]]:
    """Records of both runs for every step that both trained.

    Raises:
        ValueError: no step in common.
    """
    by_step = {step.step: step for step in run.steps}
    paired = [(step, by_step[step.step]) for step in base.steps if step.step in by_step]
    if not paired:
        raise ValueError(
            f"Runs are compared step by step; {base.name!r} and {run.name!r} have no step number in common. "
            "Train both from the same step."
        )
    return paired


def step_ratios(
    base: Run, run: Run, clock: str, phases: Sequence[str] = PHASES, num_warmup: int | None = None
) -> list[float]:
    """Baseline time / variant time a sample, of every timed step; ``clock``: cpu_s or wall_s."""
    timed = {step.step for step in timed_steps(base, num_warmup)} & {step.step for step in timed_steps(run, num_warmup)}
    ratios = []
    for pair in common_steps(base, run):
        times = [sum(getattr(step, clock).get(phase, 0.0) for phase in phases) / step.num_samples for step in pair]
        if pair[0].step in timed and min(times) > 0:
            ratios.append(times[0] / times[1])
    return ratios


def clock_of(run: Run) -> str:
    """``cpu_s`` for a run on the CPU; ``wall_s`` on a GPU, whose work process CPU time does not see."""
    device = str((run.manifest.config.get("policy") or {}).get("device") or "cpu")
    return "cpu_s" if device.startswith("cpu") else "wall_s"


def _tolerance(run: Run) -> float:
    """By what the policy computes in: its own autocast, else the dtype of its config."""
    if low_precision(run):
        return LOW_PRECISION_ROUNDING
    policy = run.manifest.config.get("policy") or {}
    dtype = run.manifest.settings.get("own_autocast") or policy.get("dtype")
    return ROUNDING["bfloat16" if dtype == "bfloat16" else "float32"]


def config_differences(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Dotted configuration keys whose value differs between runs -> value by run name."""
    flat = {run.name: _flatten(run.manifest.config) for run in runs}
    keys = sorted({key for values in flat.values() for key in values})
    return {
        key: {name: values.get(key) for name, values in flat.items()}
        for key in keys
        if not key.endswith(("output_dir", "job_name")) and len({repr(v.get(key)) for v in flat.values()}) > 1
    }


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _pair(base: Run, run: Run, bound: SpeedBound | None, num_warmup: int | None) -> PairSummary:
    paired = common_steps(base, run)
    differences = [(relative_difference(second.loss, first.loss), first.step) for first, second in paired]
    largest, largest_at = max(differences, key=lambda item: item[0])
    clock = clock_of(run)
    compute = step_ratios(base, run, clock, ("forward", "backward"), num_warmup)
    whole = step_ratios(base, run, clock, PHASES, num_warmup)
    tolerance = _tolerance(run)
    reference = ReferenceDifference.from_manifest(run.manifest.reference_check)
    same_samples = composed_as(base) == composed_as(run)
    ranks = [RanksSummary.from_settings(item.manifest.settings) for item in (base, run)]
    early = _early_difference([difference for difference, _ in differences]) if ranks[0] and ranks[1] else None
    comparable = same_samples and not any(item and item.splits_work for item in ranks)
    counted = (base.manifest.flops_per_step, run.manifest.flops_per_step) if comparable else (None, None)
    speeds = [_samples_per_second(item, clock, num_warmup) for item in (run, base)]
    return PairSummary(
        name=run.name,
        clock="process CPU time" if clock == "cpu_s" else "wall-clock time",
        num_common_steps=len(paired),
        step_ratio=spread_of(whole) if whole else None,
        compute_ratio=spread_of(compute) if compute else None,
        samples_ratio=divide(*speeds),
        same_samples=same_samples,
        first_loss_difference=differences[0][0],
        largest_loss_difference=largest,
        largest_at_step=largest_at,
        early_difference=early,
        reference=reference,
        same_function=same_samples
        and (early is None or reference is not None or early <= STRATEGY_GROWTH * tolerance)
        and math.isfinite(largest)
        and precision_words(base) == precision_words(run)
        and (differences[0][0] if reference is None else reference.variant) <= tolerance,
        tolerance=tolerance,
        algorithm_changes=_algorithm_changes(base, run),
        flop_ratio=counted[0] / counted[1] if counted[0] and counted[1] else None,
        bound=None if ranks[1] and bound and bound.this_size == 1 else bound,
        success=pair_success(base.evaluation, run.evaluation) if base.evaluation and run.evaluation else None,
    )


def _early_difference(differences: Sequence[float]) -> float:
    return max(differences[:STRATEGY_STEPS])


def composed_as(run: Run) -> dict[str, Any] | None:
    """The packing of a run whose packer composed its batches; None where upstream's sampler or an order did."""
    return dict(run.manifest.config.get("packing") or {}) if "composition" in run.manifest.settings else None


def _algorithm_changes(base: Run, run: Run) -> list[str]:
    """Settings that differ from the baseline and change what is optimised, or on which samples."""
    changes = [
        f"{key} is {values[run.name]} instead of {values[base.name]}"
        for key, values in config_differences([base, run]).items()
        if not any(key == setting or key.startswith(f"{setting}.") for setting in (*_HOW_NOT_WHAT, "precision"))
    ]
    ours, theirs = precision_words(run), precision_words(base)
    if ours != theirs:
        changes.insert(0, f"matrix products are computed in {ours} instead of {theirs}")
    return changes


def uncounted_work(runs: Sequence[Run]) -> list[str]:
    """A warning where variants preprocess in different processes, of which the CPU time counts one."""
    places = {
        run.name: (run.manifest.config.get("preprocessing") or {}).get("name", "main")
        for run in runs
        if (run.manifest.config.get("train") or {}).get("num_workers", 0) > 0
    }
    if len(set(places.values())) < 2:
        return []
    moved = ", ".join(name for name, place in places.items() if place == "workers")
    return [
        f"Process CPU time leaves the loader's workers out, and {moved} preprocesses in them. Compare CPU times with "
        "train.num_workers=0, or with one choice of preprocessing for all."
    ]


def _warnings(variants: Sequence[VariantSummary], pairs: Sequence[PairSummary]) -> list[str]:
    found = [
        f"{variant.name} waits for data during {100 * variant.data_wait_share:.0f} % of its wall-clock time; above "
        f"{100 * DATA_WAIT_LIMIT:.0f} % the data loader decides the speed. Raise num_workers or store smaller images."
        for variant in variants
        if variant.data_wait_share > DATA_WAIT_LIMIT
    ]
    found += [
        f"{variant.name} has diverged: its last losses are not finite. Lower the learning rate."
        for variant in variants
        if not math.isfinite(variant.final_loss)
    ]
    found += [f"{variant.name}: {fallback}" for variant in variants for fallback in variant.fallbacks]
    for pair in pairs:
        if not pair.same_samples:
            found.append(
                f"The steps of {pair.name} hold other samples than the baseline's: its packer composes the batches. "
                "Losses are not comparable step by step; speed is compared a sample."
            )
        elif not math.isfinite(pair.largest_loss_difference):
            found.append(
                f"{pair.name} has nothing to compare at step {pair.largest_at_step}: its loss or the baseline's is not "
                "finite there."
            )
        elif not pair.same_function:
            cause = "; ".join(pair.algorithm_changes) or "no setting that changes the algorithm explains it"
            found.append(
                f"{pair.name} does not compute the baseline's loss: it differs by {pair.first_loss_difference:.2g} at "
                f"the first step ({cause})."
            )
    return found


def _samples_per_second(run: Run, clock: str, num_warmup: int | None) -> float:
    measured = timed_steps(run, num_warmup)
    return divide(
        sum(step.num_samples for step in measured), sum(total_time(getattr(step, clock)) for step in measured)
    )
