# SPDX-License-Identifier: Apache-2.0
"""Say a comparison in words: what was run, the verdict, and the terms used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embodix.report.compare import CompareReport, PairSummary
from embodix.report.evaluation import SuccessRate
from embodix.report.summary import VariantSummary

PHASE_NAMES = {
    "data_wait": "data wait",
    "preprocess": "preprocess",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
}

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
    "FP8": "Matrix products of the language model with operands rounded to scaled 8-bit floating point; the weights "
    "that the optimizer changes stay in float32. It changes what is computed, so that losses differ from those "
    "of a variant without it by more than rounding in the policy's own precision.",
    "Wilson interval": "The range in which the true success rate lies with 95 % confidence, given the number of "
    "episodes.",
    "McNemar test": "Compares two policies on the same episodes; only episodes that one solves and the other does not "
    "count. A p-value near 1 means that they cannot be told apart.",
    "blind control": "A fixed action sequence that never looks. What it solves needs no vision.",
    "blank-image control": "The trained policy with every camera blanked. What it loses is what it used vision for.",
}


@dataclass(frozen=True)
class Verdict:
    """One finding: a short label, the figure, and the sentence that qualifies it; ``good`` colours it."""

    label: str
    figure: str
    sentence: str
    good: bool


def verdicts(report: CompareReport, pair: PairSummary) -> list[Verdict]:
    """The findings on one variant, most important first."""
    found = [_function_verdict(pair), _speed_verdict(report, pair), _bound_verdict(pair)]
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
    return (
        f"{len(report.variants)} variants of the policy {policy.get('type', 'that was configured')}{size} "
        f"trained{data}, in {policy.get('dtype', 'the default precision')}, {base.batch_size:.3g} samples a step, "
        f"seed {run.manifest.seed}, on {device}{threads}. The baseline is {report.baseline}; every other variant is "
        f"compared with it step by step. {count(base.num_warmup, 'step')} of {base.num_steps} are left out of the "
        "times: warm-up, and the step in which operations were counted."
    )


def _function_verdict(pair: PairSummary) -> Verdict:
    if not pair.same_samples:
        return Verdict(
            "Same function",
            "other samples",
            f"{pair.name} composes its batches by size, so that its steps hold other samples than the baseline's and "
            "their losses are not comparable one by one. Each step's loss is the mean over its valid action elements.",
            False,
        )
    first, largest = difference(pair.first_loss_difference), difference(pair.largest_loss_difference)
    rounding = f"where up to {pair.tolerance:.0e} is rounding"
    over_steps = (
        f"Largest relative loss difference {largest} over {count(pair.num_common_steps, 'step')} (at step "
        f"{pair.largest_at_step}); {first} at the first step"
    )
    if pair.reference is None:
        sentence = f"{over_steps}, {rounding}."
    else:
        sentence = (
            f"Against {pair.reference.reference} the loss differs by {difference(pair.reference.variant)}, {rounding}. "
            f"Upstream's own batch differs from it by {difference(pair.reference.host_batch)}: {pair.reference.cause}. "
            f"{over_steps}."
        )
    if pair.same_function:
        return Verdict("Same function", "yes", sentence, True)
    return Verdict("Same function", "no", "; ".join([*pair.algorithm_changes, sentence]), False)


def _speed_verdict(report: CompareReport, pair: PairSummary) -> Verdict | None:
    if pair.step_ratio is None:
        return None
    spread = pair.step_ratio
    parts = ""
    if pair.compute_ratio is not None:
        parts = f" Forward and backward alone: {ratio(pair.compute_ratio.median)}."
    if not pair.same_samples:
        return Verdict(
            "Speed ratio",
            ratio(pair.samples_ratio),
            f"{pair.name} trained {ratio(pair.samples_ratio)} the samples of {report.baseline} in the same "
            f"{pair.clock}; the steps hold other samples, so that single steps are not paired.",
            pair.samples_ratio > 1,
        )
    return Verdict(
        "Speed ratio",
        ratio(spread.median),
        f"A training step of {report.baseline} took {ratio(spread.median)} the {pair.clock} of {pair.name} "
        f"[{ratio(spread.low)} to {ratio(spread.high)} over {count(spread.count, 'step')}].{parts}",
        spread.median > 1,
    )


def _bound_verdict(pair: PairSummary) -> Verdict | None:
    counted = f" Torch counted {ratio(pair.flop_ratio)} in this run." if pair.flop_ratio else ""
    if pair.bound is None:
        if pair.flop_ratio is None:
            return None
        return Verdict("Bound at this size", ratio(pair.flop_ratio), f"By floating-point operations.{counted}", True)
    bound = pair.bound
    if bound.real_size is None:
        return Verdict("Bound at this size", ratio(bound.this_size), f"{bound.basis}{counted}".strip(), True)
    return Verdict(
        "Bound at real size",
        ratio(bound.real_size),
        f"By floating-point operations, {bound.real_name} can gain {ratio(bound.real_size)} on this data; the model "
        f"run here can gain {ratio(bound.this_size)}. The measured ratio is the small model's and must not stand for "
        f"the large one.{counted}",
        True,
    )


def _success_verdict(report: CompareReport, pair: PairSummary) -> Verdict | None:
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
    return Verdict(
        "Success in simulation",
        percent(variant.success.rate),
        f"{pair.name} {success_words(variant.success)}; {report.baseline} {success_words(base.success)}."
        f"{paired}{controls}",
        variant.success.high >= base.success.rate,
    )


def verdict_line(report: CompareReport, pair: PairSummary) -> str:
    """All findings on one variant in one line, for a terminal or a log."""
    parts = [f"{item.label.lower()}: {item.figure}" for item in verdicts(report, pair)]
    return f"{pair.name} against {report.baseline}: " + "; ".join(parts)


def success_words(success: SuccessRate) -> str:
    return (
        f"{success.num_success}/{success.num_episodes} = {percent(success.rate)} "
        f"[{percent(success.low)} to {percent(success.high)}]"
    )


def loss_difference(pair: PairSummary) -> str:
    """The largest relative loss difference, where steps are comparable."""
    return difference(pair.largest_loss_difference) if pair.same_samples else "other samples"


def variant_row(variant: VariantSummary) -> Mapping[str, Any]:
    """What distinguishes a variant, by plain label."""
    return {
        "packing": variant.packer or "not recorded",
        "attention": variant.attention or "not recorded",
        "precision": variant.precision,
    }


def ratio(value: float | None) -> str:
    return "not measured" if value is None or math.isnan(value) else f"{value:.2f}×"


def percent(value: float | None, digits: int = 0) -> str:
    return "not counted" if value is None or math.isnan(value) else f"{100 * value:.{digits}f} %"


def difference(value: float) -> str:
    return "0 (bit-equal)" if value == 0 else f"{value:.1e}"


def quantity(value: float | None, unit: str = "") -> str:
    """A number with three digits and an SI prefix: 4.14 G, 617, 12.2 T."""
    if value is None or math.isnan(value):
        return "not measured"
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def memory(num_bytes: float | None) -> str:
    """Bytes in binary units: 3.2 GiB."""
    if num_bytes is None:
        return "not measured"
    for power, unit in ((3, "GiB"), (2, "MiB")):
        if num_bytes >= 1000 * 1024 ** (power - 1):  # never 1e+03 of the smaller unit
            return f"{num_bytes / 1024**power:.3g} {unit}"
    return f"{num_bytes / 1024:.3g} KiB"


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
