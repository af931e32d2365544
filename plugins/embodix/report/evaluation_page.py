# SPDX-License-Identifier: Apache-2.0
"""Evaluations on the same episodes for a reader: as a page with pictures, and in the terminal."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
from PIL import Image
from rich.console import Console
from rich.table import Table

from embodix.report.evaluation import (
    CONTROLS,
    EpisodeRecord,
    Evaluation,
    PairedSuccess,
    SuccessRate,
    distinct_controls,
    pair_success,
    success_by_task,
)
from embodix.report.page import TERMS, Card, Page, colour, known_provenance
from embodix.report.plots import episode_lengths, rates_by_task
from embodix.report.words import count, percent, success_words

MAX_PICTURES, PICTURE_HEIGHT = 24, 168
GLOSSARY = {
    "wrong-prompt control": "The trained policy told to do another task. What it still solves needs no language.",
    "difference interval": "The range in which the true difference of two success rates lies with 95 % confidence, "
    "from episodes that both ran (Tango's score interval). Where it holds zero, the episodes do not tell them apart.",
    "seed": "Decides an episode's scene and the policy's own noise. The same seeds are the same episodes for every "
    "checkpoint, whatever the number of worker processes.",
}

Pair = tuple[Evaluation, Evaluation, PairedSuccess]
"""Baseline, variant, and what their common episodes say."""
Actor = tuple[str, Sequence[EpisodeRecord], bool]
"""Name, episodes, and whether it is a control."""


@dataclass(frozen=True)
class EvaluatedFolder:
    """An evaluation, and its folder relative to the page ("" where they share one)."""

    evaluation: Evaluation
    folder: str = ""


def render_evaluations(evaluated: Sequence[EvaluatedFolder], page_folder: Path) -> str:
    """The page as text; pictures come from the videos, which it links to.

    Args:
        evaluated: the first is the baseline of the pairs.
        page_folder: where the page will stand.

    Raises:
        ValueError: nothing to show, or two evaluations of one name.
    """
    evaluations = [item.evaluation for item in evaluated]
    names = [evaluation.name for evaluation in evaluations]
    if not evaluations or len(set(names)) < len(names):
        raise ValueError(f"A page shows one or more evaluations of different names; got {names}.")
    pairs = _pairs(evaluations)
    page = Page(
        title=_title(evaluations),
        paragraph=_paragraph(evaluations),
        provenance=_provenance(evaluations),
        cards=_cards(evaluations, pairs),
        warnings=_warnings(evaluations),
        figures={"rates": rates_by_task(evaluations), "lengths": episode_lengths(evaluations)},
        details=[
            (f"Settings of {evaluation.name}", json.dumps(_settings(evaluation), indent=2))
            for evaluation in evaluations
        ],
        glossary={**TERMS, **GLOSSARY},
    )
    return page.render(
        "evaluation.html.j2",
        filters={"points": _pair_points},
        pairs=[(pair, _pair_sentence(*pair)) for pair in pairs],
        tasks=_task_rows(evaluations),
        pictures=_pictures(evaluated, page_folder),
    )


def _pairs(evaluations: Sequence[Evaluation]) -> list[Pair]:
    """Each further evaluation with the first, on the episodes that they share."""
    baseline = evaluations[0]
    pairs = [(baseline, variant, pair_success(baseline, variant)) for variant in evaluations[1:]]
    return [(baseline, variant, pair) for baseline, variant, pair in pairs if pair is not None]


def _task_rows(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """One row a task and actor; the first of a task carries its instruction."""
    rows = []
    for task in dict.fromkeys(task for evaluation in evaluations for task in evaluation.by_task):
        shown = _of_task(_actors(evaluations), task)
        for place, (name, episodes, control) in enumerate(shown):
            rows.append(
                {
                    "task": task if place == 0 else None,
                    "num_rows": len(shown),
                    "instruction": _instruction(evaluations, task),
                    "actor": name,
                    "control": control,
                    "success": success_by_task(episodes)[task],
                    "mean_steps": _mean([e.num_steps for e in episodes if e.num_steps is not None]),
                    "mean_reward": _mean([e.sum_reward for e in episodes if e.sum_reward is not None]),
                }
            )
    return rows


def _actors(evaluations: Sequence[Evaluation]) -> list[Actor]:
    """Each evaluation followed by its controls."""
    actors: list[Actor] = []
    for evaluation, controls in zip(evaluations, distinct_controls(evaluations), strict=True):
        actors.append((evaluation.name, evaluation.episodes, False))
        actors += [(name.replace("_", " "), episodes, True) for name, episodes in controls.items()]
    return actors


def _of_task(actors: Sequence[Actor], task: str) -> list[Actor]:
    """The actors that have episodes of a task, with these alone."""
    of_task = [(name, [e for e in episodes if e.task == task], control) for name, episodes, control in actors]
    return [actor for actor in of_task if actor[1]]


def _instruction(evaluations: Sequence[Evaluation], task: str) -> str:
    found = [evaluation.details.get("tasks", {}).get(task, {}).get("instruction") for evaluation in evaluations]
    return next((text for text in found if text), "")


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _pictures(evaluated: Sequence[EvaluatedFolder], page_folder: Path) -> list[dict[str, Any]]:
    """A strip of each recorded episode, up to ``MAX_PICTURES``."""
    recorded = [
        (item, episode) for item in evaluated for episode in item.evaluation.episodes if episode.video is not None
    ]
    return [_picture(item, episode, page_folder, len(evaluated) > 1) for item, episode in recorded[:MAX_PICTURES]]


def _picture(item: EvaluatedFolder, episode: EpisodeRecord, page_folder: Path, several: bool) -> dict[str, Any]:
    address = f"{item.folder}/{episode.video}" if item.folder else str(episode.video)
    outcome = "solved" if episode.success else "not solved"
    steps = f" in {episode.num_steps} steps" if episode.num_steps is not None else ""
    return {
        "frames": film_strip(page_folder / address),
        "address": address,
        "solved": episode.success,
        "caption": f"{item.evaluation.name + ', ' if several else ''}{episode.task}, seed {episode.seed}: "
        f"{outcome}{steps}",
    }


def _settings(evaluation: Evaluation) -> Mapping[str, Any]:
    return {key: evaluation.details[key] for key in ("settings", "env", "policy") if key in evaluation.details}


def _provenance(evaluations: Sequence[Evaluation]) -> list[tuple[str, str]]:
    """Code and machine of the first evaluation, then what belongs to each."""
    rows = known_provenance(evaluations[0].details.get("provenance", {}))
    for evaluation in evaluations:
        details = evaluation.details
        rows.append((f"{evaluation.name}: checkpoint", str(details.get("checkpoint") or "none, a controller")))
        if details.get("policy", {}).get("changes"):
            rows.append((f"{evaluation.name}: with", ", ".join(details["policy"]["changes"])))
        if "created_at" in details:
            times = f"{details['wall_s']:.0f} s, {details['cpu_s']:.0f} s of processor time"
            rows.append((f"{evaluation.name}: evaluated", f"{details['created_at']}, in {times}"))
    return rows


def film_strip(video: Path, num_frames: int = 3) -> list[str]:
    """Frames from the first to the last of a video, evenly spaced, as ``data:`` addresses of JPEG images.

    Raises:
        ValueError: the file holds no frame.
    """
    with av.open(str(video)) as container:
        frames = [frame.to_image() for frame in container.decode(video=0)]
    if not frames:
        raise ValueError(f"{video} holds no frame; record the episode again.")
    places = [round(index * (len(frames) - 1) / max(1, num_frames - 1)) for index in range(num_frames)]
    return [_data_address(frames[place]) for place in dict.fromkeys(places)]


def _data_address(image: Image.Image) -> str:
    width = round(image.width * PICTURE_HEIGHT / image.height)
    resampling = Image.Resampling.NEAREST if image.height < PICTURE_HEIGHT else Image.Resampling.LANCZOS
    buffer = io.BytesIO()
    image.resize((width, PICTURE_HEIGHT), resampling).save(buffer, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def _title(evaluations: Sequence[Evaluation]) -> str:
    tasks = dict.fromkeys(task for evaluation in evaluations for task in evaluation.by_task)
    where = next(iter(tasks)) if len(tasks) == 1 else count(len(tasks), "task")
    return f"{' and '.join(evaluation.name for evaluation in evaluations)} on {where}"


def _paragraph(evaluations: Sequence[Evaluation]) -> str:
    """One paragraph for a reader who was not there."""
    first = evaluations[0]
    seeds = sorted({seed for _, seed in first.outcomes})
    simulator = first.details.get("env", {}).get("type", "the simulator")
    checkpoints = list(dict.fromkeys(str(e.details["checkpoint"]) for e in evaluations if e.details.get("checkpoint")))
    what = f"{count(len(checkpoints), 'checkpoint')} ({', '.join(checkpoints)})" if checkpoints else "A controller"
    changed = [
        f"{e.name} with {', '.join(e.details['policy']['changes'])}"
        for e in evaluations
        if e.details.get("policy", {}).get("changes")
    ]
    what += f", {'; '.join(changed)}," if changed else ""
    per_task = len(first.episodes) / len(first.by_task)
    return (
        f"{what} in {simulator}: {count(len(first.by_task), 'task')}, {per_task:g} episodes each, seeds {seeds[0]} to "
        f"{seeds[-1]}. The episodes were fixed before anything ran"
        + (" and are the same for all." if len(evaluations) > 1 else ".")
    )


def _cards(evaluations: Sequence[Evaluation], pairs: Sequence[Pair]) -> list[Card]:
    """Success of each, the paired differences, and each control with what it leaves to the policy."""
    found = [_success_card(evaluation) for evaluation in evaluations]
    for baseline, variant, pair in pairs:
        label = f"{variant.name} against {baseline.name}"
        if not _is_known(pair):
            found.append(Card(label, "not known", _pair_sentence(baseline, variant, pair), "plain"))
            continue
        kind = "plain" if pair.low <= 0.0 <= pair.high else colour(pair.low > 0.0)
        sentence = (
            f"{_pair_points(pair)} on {count(pair.num_episodes, 'episode')} that both ran (exact McNemar test, p = "
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
    kind = colour(evaluation.success.num_success > 0)
    return Card(evaluation.name, percent(evaluation.success.rate), sentence, kind)


def _control_card(evaluation: Evaluation, name: str, prefix: str) -> Card:
    control, rest = evaluation.controls[name], evaluation.success_where_fails(name)
    left = f" Where it fails, {evaluation.name} solves {success_words(rest)}." if rest and name != "expert" else ""
    sentence = f"{CONTROLS.get(name, name).capitalize()}: {success_words(control)}.{left}"
    return Card(f"{prefix}{name.replace('_', ' ')}", percent(control.rate), sentence, "plain")


def _pair_sentence(baseline: Evaluation, variant: Evaluation, pair: PairedSuccess) -> str:
    """What the paired episodes say of two checkpoints."""
    if not _is_known(pair):
        return (
            f"On {count(pair.num_episodes, 'episode')} that both ran, nothing can be said of {variant.name} against "
            f"{baseline.name}: the interval of their difference is not finite."
        )
    apart = "cannot be told apart from" if pair.low <= 0.0 <= pair.high else "differs from"
    return (
        f"On {count(pair.num_episodes, 'episode')} that both ran, {variant.name} {apart} {baseline.name}: the "
        f"difference of their success rates is {_pair_points(pair)}. Both solve {pair.both}, neither {pair.neither}, "
        f"only {baseline.name} {pair.only_baseline}, only {variant.name} {pair.only_variant} (exact McNemar test, "
        f"p = {pair.p_value:.2g})."
    )


def _is_known(pair: PairedSuccess) -> bool:
    return all(map(math.isfinite, (pair.difference, pair.low, pair.high, pair.p_value)))


def _pair_points(pair: PairedSuccess) -> str:
    """The difference with its interval, in percentage points: +12 [-3, +26] points."""
    difference, low, high = (f"{100 * value:+.0f}" for value in (pair.difference, pair.low, pair.high))
    return f"{difference} [{low}, {high}] points"


def _warnings(evaluations: Sequence[Evaluation]) -> list[str]:
    """What a reader must mind."""
    found = [
        f"{variant.name} and {evaluations[0].name} have no episode in common: nothing is said of their difference."
        for variant in evaluations[1:]
        if pair_success(evaluations[0], variant) is None
    ]
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
        without = [episode for episode in evaluation.episodes if episode.sum_reward is None]
        if without and len(without) < len(evaluation.episodes):
            found.append(
                f"{evaluation.name}: {count(len(without), 'episode')} had no finite reward; mean rewards are of the "
                "others."
            )
        num_per_task = min(success.num_episodes for success in evaluation.by_task.values())
        if num_per_task < 10:
            found.append(
                f"{evaluation.name}: {count(num_per_task, 'episode')} a task say little; see the intervals, and give "
                "eval.n_episodes=50 for figures to report."
            )
    return found


def print_evaluations(evaluations: Sequence[Evaluation], console: Console | None = None) -> None:
    """Print the table, the pairs against the first evaluation, and what the reader must mind."""
    console = console or Console()
    console.print(_table(evaluations))
    for variant in evaluations[1:]:
        pair = pair_success(evaluations[0], variant)
        if pair is not None:
            console.print(_pair_sentence(evaluations[0], variant, pair), highlight=False, soft_wrap=True)
    for warning in _warnings(evaluations):
        console.print(f"[yellow]Mind:[/] {warning}", highlight=False, soft_wrap=True)


def _table(evaluations: Sequence[Evaluation]) -> Table:
    """A block of rows for each task, and one for all: each evaluation followed by its controls."""
    actors = _actors(evaluations)
    table = Table(title="Episodes solved, with the 95 % Wilson interval", title_justify="left")
    table.add_column("task", overflow="fold")
    table.add_column("actor", overflow="fold")
    table.add_column("solved", justify="right", no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    tasks = list(dict.fromkeys(episode.task for _, episodes, _ in actors for episode in episodes))
    for task in tasks:
        _add_block(table, task, _of_task(actors, task))
    if len(tasks) > 1:
        _add_block(table, "all", actors)
    return table


def _add_block(table: Table, label: str, actors: Sequence[Actor]) -> None:
    table.add_section()
    for name, episodes, control in actors:
        success = SuccessRate.of([episode.success for episode in episodes])
        steps = [episode.num_steps for episode in episodes if episode.num_steps is not None]
        length = f"{sum(steps) / len(steps):.0f}" if steps else ""
        shown = (f"  {name}", "dim") if control else (name, "")
        table.add_row(label, shown[0], success_words(success), length, style=shown[1])
        label = ""
