# SPDX-License-Identifier: Apache-2.0
"""Say an evaluation in words: what was run, what came out, what to mind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from embodix.report.evaluation import CONTROLS, Evaluation, PairedSuccess, distinct_controls
from embodix.report.wording import count, percent, success_words

GLOSSARY = {
    "wrong-prompt control": "The trained policy told to do another task. What it still solves needs no language.",
    "difference interval": "The range in which the true difference of two success rates lies with 95 % confidence, "
    "from episodes that both ran (Tango's score interval). Where it holds zero, the episodes do not tell them apart.",
    "seed": "Decides an episode's scene and the policy's own noise. The same seeds are the same episodes for every "
    "checkpoint, whatever the number of worker processes.",
}


Pair = tuple[Evaluation, Evaluation, PairedSuccess]
"""Baseline, variant, and what their common episodes say."""


@dataclass(frozen=True)
class Card:
    """One figure with its sentence; ``kind`` colours it: good, bad or plain."""

    label: str
    figure: str
    sentence: str
    kind: str


def title(evaluations: Sequence[Evaluation]) -> str:
    tasks = dict.fromkeys(task for evaluation in evaluations for task in evaluation.by_task)
    where = next(iter(tasks)) if len(tasks) == 1 else count(len(tasks), "task")
    return f"{' and '.join(evaluation.name for evaluation in evaluations)} on {where}"


def what_was_run(evaluations: Sequence[Evaluation]) -> str:
    """One paragraph for a reader who was not there."""
    first = evaluations[0]
    seeds = sorted({seed for _, seed in first.outcomes})
    simulator = first.details.get("env", {}).get("type", "the simulator")
    checkpoints = [str(e.details["checkpoint"]) for e in evaluations if e.details.get("checkpoint")]
    what = f"{count(len(checkpoints), 'checkpoint')} ({', '.join(checkpoints)})" if checkpoints else "A controller"
    per_task = len(first.episodes) / len(first.by_task)
    return (
        f"{what} in {simulator}: {count(len(first.by_task), 'task')}, {per_task:g} episodes each, seeds {seeds[0]} to "
        f"{seeds[-1]}. The episodes were fixed before anything ran"
        + (" and are the same for all." if len(evaluations) > 1 else ".")
    )


def cards(evaluations: Sequence[Evaluation], pairs: Sequence[Pair]) -> list[Card]:
    """Success of each, the paired differences, and each control with what it leaves to the policy."""
    found = [_success_card(evaluation) for evaluation in evaluations]
    for baseline, variant, pair in pairs:
        label = f"{variant.name} against {baseline.name}"
        kind = "plain" if pair.low <= 0.0 <= pair.high else "good" if pair.low > 0.0 else "bad"
        sentence = (
            f"{pair_points(pair)} on {count(pair.num_episodes, 'episode')} that both ran (exact McNemar test, p = "
            f"{pair.p_value:.2g})."
        )
        found.append(Card(label, f"{100 * pair.difference:+.0f}", sentence, kind))
    distinct = distinct_controls(evaluations)
    for evaluation, controls in zip(evaluations, distinct, strict=True):
        for name in controls:
            shared = sum(name in others for others in distinct) == 1
            found.append(_control_card(evaluation, name, "" if shared else f"{evaluation.name}: "))
    return found


def _success_card(evaluation: Evaluation) -> Card:
    sentence = f"Solved {success_words(evaluation.success)} (95 % Wilson interval)."
    kind = "good" if evaluation.success.num_success else "bad"
    return Card(evaluation.name, percent(evaluation.success.rate), sentence, kind)


def _control_card(evaluation: Evaluation, name: str, prefix: str) -> Card:
    control, rest = evaluation.controls[name], evaluation.success_where_fails(name)
    left = f" Where it fails, {evaluation.name} solves {success_words(rest)}." if rest and name != "expert" else ""
    sentence = f"{CONTROLS.get(name, name).capitalize()}: {success_words(control)}.{left}"
    return Card(f"{prefix}{name.replace('_', ' ')}", percent(control.rate), sentence, "plain")


def pair_sentence(baseline: Evaluation, variant: Evaluation, pair: PairedSuccess) -> str:
    """What the paired episodes say of two checkpoints."""
    apart = "cannot be told apart from" if pair.low <= 0.0 <= pair.high else "differs from"
    return (
        f"On {count(pair.num_episodes, 'episode')} that both ran, {variant.name} {apart} {baseline.name}: the "
        f"difference of their success rates is {pair_points(pair)}. Both solve {pair.both}, neither {pair.neither}, "
        f"only {baseline.name} {pair.only_baseline}, only {variant.name} {pair.only_variant} (exact McNemar test, "
        f"p = {pair.p_value:.2g})."
    )


def pair_points(pair: PairedSuccess) -> str:
    """The difference with its interval, in percentage points: +12 [-3, +26] points."""
    difference, low, high = (f"{100 * value:+.0f}" for value in (pair.difference, pair.low, pair.high))
    return f"{difference} [{low}, {high}] points"


def warnings(evaluations: Sequence[Evaluation]) -> list[str]:
    """What a reader must mind."""
    found = []
    for evaluation in evaluations:
        found += [f"{evaluation.name}: {note}" for note in evaluation.details.get("policy", {}).get("notes", [])]
        repeated = [episode for episode in evaluation.episodes if episode.num_repeats]
        if repeated:
            found.append(
                f"{evaluation.name}: {count(len(repeated), 'episode')} lost a simulator and began again with the same "
                "seed; the outcome is that of an undisturbed episode."
            )
        if evaluation.details.get("settings", {}).get("resumed"):
            found.append(
                f"{evaluation.name} was interrupted and continued: its batches were composed otherwise than in one go, "
                "which can change the last digits of an action."
            )
        num_per_task = min(success.num_episodes for success in evaluation.by_task.values())
        if num_per_task < 10:
            found.append(
                f"{evaluation.name}: {count(num_per_task, 'episode')} a task say little; see the intervals, and give "
                "eval.n_episodes=50 for figures to report."
            )
    return found
