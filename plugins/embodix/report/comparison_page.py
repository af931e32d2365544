# SPDX-License-Identifier: Apache-2.0
"""A comparison of training variants for a reader: its findings in words, its page and its record."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodix.report import plots
from embodix.report.compare import STRATEGY_GROWTH, STRATEGY_STEPS, CompareReport, PairSummary, SpeedBound, compare_runs
from embodix.report.manifest import write_text_atomically
from embodix.report.page import HTML_NAME, TERMS, Card, Page, colour, provenance_rows
from embodix.report.ranks import COUNTED, RanksSummary, exchange_words
from embodix.report.runs import VariantSummary, precision_terms, read_variants
from embodix.report.steps import PHASES
from embodix.report.words import (
    PHASE_NAMES,
    count,
    difference,
    memory,
    percent,
    quantity,
    ratio,
    success_words,
)

JSON_NAME = "report.json"
GLOSSARY = {
    "variant": "One way to train the same policy on the same samples. The baseline is upstream LeRobot, unchanged.",
    "same function": "Both variants compute the same loss from the same weights and samples, up to rounding. Judged at "
    "the first step; later steps start from weights that rounding has already moved apart.",
    "speed ratio": "Baseline time divided by variant time, taken for every step on the same samples, then summarised "
    "by its median and its 5-95 % range. Above 1, the variant is faster. A variant that composes its own batches is "
    "compared by samples a second instead.",
    "process CPU time": "Seconds that the processor worked for this process, on all threads. Other programs on the "
    "machine do not count, so it is the fair clock on a CPU; wall-clock time is what a clock on the wall shows.",
    "bound": "The ratio of floating-point operations, baseline over variant: what leaving out dead tokens and blank "
    "images allows when time follows arithmetic. A CPU run can beat it, because the memory traffic of masks and "
    "padding disappears too; expect a GPU run of the large model to come near the bound at real size, not above.",
    "token": "One position of the transformer's input: a patch of an image, a piece of the instruction, or one action "
    "of the chunk. Computed tokens cost time whether they carry input or are padding.",
    "utilisation": "Valid tokens divided by computed tokens. 100 % means that nothing computed was padding.",
    "padding": "Positions without input: the instruction is filled up to a fixed length, a camera that the robot lacks "
    "is a blank image, an action chunk that runs past the end of the episode repeats its last action.",
}


def write_comparison(
    folder: Path | str,
    *,
    baseline: str | None = None,
    bounds: Mapping[str, SpeedBound] | None = None,
    num_warmup: int | None = None,
    title: str = "Comparison of training variants",
) -> CompareReport:
    """Compare the runs in ``<folder>/variants/`` and write both files into ``folder``.

    See :func:`embodix.report.compare.compare_runs` for the arguments.

    Raises:
        FileNotFoundError, ValueError: the runs are missing or cannot be compared; the message says why.
    """
    report = compare_runs(read_variants(folder), baseline=baseline, bounds=bounds, num_warmup=num_warmup, title=title)
    write_report(report, folder)
    return report


def write_report(report: CompareReport, folder: Path | str) -> None:
    """Write ``report.json`` and ``report.html``."""
    folder = Path(folder)
    write_text_atomically(folder / JSON_NAME, json.dumps(report_record(report), indent=2, allow_nan=False) + "\n")
    write_text_atomically(folder / HTML_NAME, render_comparison(report))


def render_comparison(report: CompareReport) -> str:
    """The page as text. Figures whose data were not recorded are left out."""
    page = Page(
        title=report.title,
        paragraph=what_was_run(report),
        provenance=provenance_rows(report.runs),
        warnings=report.warnings,
        figures=_figures(report),
        details=[
            (f"Resolved configuration of {run.name}", json.dumps(run.manifest.config, indent=2)) for run in report.runs
        ],
        glossary={**GLOSSARY, **TERMS, **precision_terms(report.runs)},
    )
    found = [(pair, verdicts(report, pair)) for pair in report.pairs]
    return page.render(
        "comparison.html.j2",
        report=report,
        verdicts=found,
        verdict_labels=list(dict.fromkeys(card.label for _, cards in found for card in cards)),
        summary=[_summary_row(report, variant) for variant in report.variants],
        phases=[(PHASE_NAMES[phase], phase) for phase in PHASES],
        work=[_work_row(report, variant) for variant in report.variants],
        spread=[(variant.name, variant.ranks) for variant in report.variants if variant.ranks is not None],
        exchange_words=exchange_words,
        how_counted=COUNTED,
        bounds=[pair for pair in report.pairs if pair.bound is not None],
        evaluated=[variant for variant in report.variants if variant.evaluation is not None],
    )


def _figures(report: CompareReport) -> dict[str, str | None]:
    return {
        "loss": plots.loss_curves(report),
        "differences": plots.loss_differences(report),
        "phases": plots.phase_times(report),
        "ratios": plots.speed_ratios(report),
        "tokens": plots.tokens_per_sample(report),
        "success": plots.success_rates(report),
    }


def _pair_of(report: CompareReport, variant: VariantSummary) -> PairSummary | None:
    return next((pair for pair in report.pairs if pair.name == variant.name), None)


def _summary_row(report: CompareReport, variant: VariantSummary) -> dict[str, Any]:
    pair = _pair_of(report, variant)
    return {
        "variant": variant,
        "ratio": pair and pair.step_ratio,
        "samples_per_s": variant.samples_per_cpu_s if report.pairs[0].clock.startswith("process") else
        variant.samples_per_wall_s,
        "pair": pair,
        "loss_difference": loss_difference(pair) if pair else "",
        "packing": variant.packer or "not recorded",
        "attention": variant.attention or "not recorded",
        "precision": variant.precision,
    }  # fmt: skip


def _work_row(report: CompareReport, variant: VariantSummary) -> dict[str, Any]:
    pair = _pair_of(report, variant)
    return {"variant": variant, "flop_ratio": pair and pair.flop_ratio, "bound": pair and pair.bound}


def report_record(report: CompareReport) -> dict[str, Any]:
    """The report as plain containers for strict JSON: NaN and infinities become null, series are kept by step."""
    record = {
        "title": report.title,
        "what_was_run": what_was_run(report),
        "baseline": report.baseline,
        "verdicts": {pair.name: verdict_line(report, pair) for pair in report.pairs},
        "warnings": report.warnings,
        "variants": [dataclasses.asdict(variant) for variant in report.variants],
        "pairs": [dataclasses.asdict(pair) for pair in report.pairs],
        "config_differences": report.config_differences,
        "provenance": {run.name: dataclasses.asdict(run.manifest.provenance) for run in report.runs},
        "loss": {run.name: {str(step.step): step.loss for step in run.steps} for run in report.runs},
    }
    return dict(_plain(record))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {" #".join(map(str, key)) if isinstance(key, tuple) else str(key): _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def verdicts(report: CompareReport, pair: PairSummary) -> list[Card]:
    """The findings on one variant, most important first."""
    found = [_function_verdict(pair), _speed_verdict(report, pair), _ranks_verdict(report, pair), _bound_verdict(pair)]
    success = _success_verdict(report, pair)
    return [item for item in (*found, success) if item is not None]


def what_was_run(report: CompareReport) -> str:
    """One paragraph for a reader who was not there."""
    base, run = report.variant(report.baseline), report.runs[0]
    config, provenance = run.manifest.config, run.manifest.provenance
    policy, dataset = config.get("policy") or {}, config.get("dataset") or {}
    size = f" with {quantity(base.num_parameters)} parameters" if base.num_parameters else ""
    data = f" on the dataset {dataset['repo_id']}" if dataset.get("repo_id") else ""
    if dataset.get("members"):
        data = f" on a mixture of {' and '.join(dataset['members'])}"
    device = ", ".join(provenance.gpu) if str(policy.get("device", "cpu")).startswith("cuda") else provenance.cpu
    threads = f", {count(provenance.num_threads, 'thread')}" if provenance.num_threads else ""
    ranks = "" if base.ranks is None else f", in {base.ranks.num_ranks} processes of which the times are the first's"
    return (
        f"{len(report.variants)} variants of the policy {policy.get('type', 'that was configured')}{size} "
        f"trained{data}, in {policy.get('dtype', 'the default precision')}, {base.batch_size:.3g} samples a step, "
        f"seed {run.manifest.seed}, on {device}{threads}{ranks}. The baseline is {report.baseline}; every other "
        f"variant is compared with it step by step. {count(base.num_warmup, 'step')} of {base.num_steps} are left "
        "out of the times: warm-up, and the step in which operations were counted."
    )


def _function_verdict(pair: PairSummary) -> Card:
    if not pair.same_samples:
        return Card(
            "Same function",
            "other samples",
            f"{pair.name} composes its batches by size, so that its steps hold other samples than the baseline's and "
            "their losses are not comparable one by one. Each step's loss is the mean over its valid action elements.",
            "bad",
        )
    first, largest = difference(pair.first_loss_difference), difference(pair.largest_loss_difference)
    rounding = f"where up to {pair.tolerance:.0e} is rounding"
    over_steps = (
        f"Largest relative loss difference {largest} over {count(pair.num_common_steps, 'step')} (at step "
        f"{pair.largest_at_step}); {first} at the first step"
    )
    if pair.reference is None and pair.early_difference is not None:
        limit = f"where up to {pair.tolerance:.0e} at the first step and {STRATEGY_GROWTH * pair.tolerance:.0e}"
        early = f"{difference(pair.early_difference)} in the first {min(STRATEGY_STEPS, pair.num_common_steps)}"
        sentence = f"{over_steps}, {early}, {limit} in those is rounding."
    elif pair.reference is None:
        sentence = f"{over_steps}, {rounding}."
    else:
        sentence = (
            f"Against {pair.reference.reference} the loss differs by {difference(pair.reference.variant)}, {rounding}. "
            f"Upstream's own batch differs from it by {difference(pair.reference.host_batch)}: {pair.reference.cause}. "
            f"{over_steps}."
        )
    if pair.same_function:
        return Card("Same function", "yes", sentence, "good")
    return Card("Same function", "no", "; ".join([*pair.algorithm_changes, sentence]), "bad")


def _speed_verdict(report: CompareReport, pair: PairSummary) -> Card | None:
    if pair.step_ratio is None:
        return None
    spread = pair.step_ratio
    parts = ""
    if pair.compute_ratio is not None:
        parts = f" Forward and backward alone: {ratio(pair.compute_ratio.median)}."
    if not pair.same_samples:
        return Card(
            "Speed ratio",
            ratio(pair.samples_ratio),
            f"{pair.name} trained {ratio(pair.samples_ratio)} the samples of {report.baseline} in the same "
            f"{pair.clock}; the steps hold other samples, so that single steps are not paired.",
            colour(pair.samples_ratio > 1),
        )
    return Card(
        "Speed ratio",
        ratio(spread.median),
        f"A training step of {report.baseline} took {ratio(spread.median)} the {pair.clock} of {pair.name} "
        f"[{ratio(spread.low)} to {ratio(spread.high)} over {count(spread.count, 'step')}].{parts}",
        colour(spread.median > 1),
    )


def _ranks_verdict(report: CompareReport, pair: PairSummary) -> Card | None:
    ours, theirs = report.variant(pair.name).ranks, report.variant(report.baseline).ranks
    if ours is None or theirs is None:
        return None
    exchanged = ""
    if ours.exchanged_bytes is not None and theirs.exchanged_bytes is not None:
        exchanged = (
            f" In one step {pair.name} exchanged {memory(ours.exchanged_bytes)} ({exchange_words(ours)}), "
            f"{report.baseline} {memory(theirs.exchanged_bytes)} ({exchange_words(theirs)})."
        )
    return Card(
        "Held by a rank",
        memory(ours.held_bytes),
        f"Parameters and optimizer state of {pair.name} ({_spread_words(ours)}); {memory(theirs.held_bytes)} of "
        f"{report.baseline} ({_spread_words(theirs)}).{exchanged}",
        colour(ours.held_bytes <= theirs.held_bytes),
    )


def _spread_words(ranks: RanksSummary) -> str:
    return f"{ranks.strategy}, {ranks.layout}"


def _bound_verdict(pair: PairSummary) -> Card | None:
    counted = f" Torch counted {ratio(pair.flop_ratio)} in this run." if pair.flop_ratio else ""
    if pair.bound is None:
        same_work = pair.early_difference is not None and pair.flop_ratio is not None and round(pair.flop_ratio, 2) == 1
        if pair.flop_ratio is None or same_work:
            return None
        return Card("Bound at this size", ratio(pair.flop_ratio), f"By floating-point operations.{counted}", "good")
    bound = pair.bound
    if bound.real_size is None:
        return Card("Bound at this size", ratio(bound.this_size), f"{bound.basis}{counted}".strip(), "good")
    return Card(
        "Bound at real size",
        ratio(bound.real_size),
        f"By floating-point operations, {bound.real_name} can gain {ratio(bound.real_size)} on this data; the model "
        f"run here can gain {ratio(bound.this_size)}. The measured ratio is the small model's and must not stand for "
        f"the large one.{counted}",
        "good",
    )


def _success_verdict(report: CompareReport, pair: PairSummary) -> Card | None:
    variant, base = report.variant(pair.name).evaluation, report.variant(report.baseline).evaluation
    if variant is None or base is None:
        return None
    controls = "".join(
        f" {name.replace('_', '-').capitalize()} control: {percent(control.rate)}."
        for name, control in variant.controls.items()
    )
    paired = ""
    if pair.success is not None:
        paired = (
            f" Of the same {pair.success.num_episodes} episodes, {pair.success.only_variant} solved only by "
            f"{pair.name}, {pair.success.only_baseline} only by {report.baseline} (p = {pair.success.p_value:.2g})."
        )
    return Card(
        "Success in simulation",
        percent(variant.success.rate),
        f"{pair.name} {success_words(variant.success)}; {report.baseline} {success_words(base.success)}."
        f"{paired}{controls}",
        colour(variant.success.high >= base.success.rate),
    )


def verdict_line(report: CompareReport, pair: PairSummary) -> str:
    """All findings on one variant in one line, for a terminal or a log."""
    parts = [f"{item.label.lower()}: {item.figure}" for item in verdicts(report, pair)]
    return f"{pair.name} against {report.baseline}: " + "; ".join(parts)


def loss_difference(pair: PairSummary) -> str:
    """The largest relative loss difference, where steps are comparable."""
    return difference(pair.largest_loss_difference) if pair.same_samples else "other samples"
