# SPDX-License-Identifier: Apache-2.0
"""Evaluations on the same episodes as one self-contained HTML page: rates, lengths, pictures, pairs, provenance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodix.report import evaluation_wording as wording
from embodix.report.evaluation import (
    EpisodeRecord,
    Evaluation,
    distinct_controls,
    pair_success,
    success_by_task,
)
from embodix.report.film import film_strip
from embodix.report.html import markup_of, page_environment, provenance_texts
from embodix.report.success_plots import episode_lengths, rates_by_task
from embodix.report.wording import GLOSSARY

TERMS = ("Wilson interval", "McNemar test", "blind control", "blank-image control")
MAX_PICTURES = 24


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
    environment = page_environment()
    environment.filters |= {"points": wording.pair_points}
    return environment.get_template("evaluation.html.j2").render(
        title=wording.title(evaluations),
        run_paragraph=wording.what_was_run(evaluations),
        cards=wording.cards(evaluations, _pairs(evaluations)),
        pairs=[(pair, wording.pair_sentence(*pair)) for pair in _pairs(evaluations)],
        evaluations=evaluations,
        tasks=_task_rows(evaluations),
        warnings=wording.warnings(evaluations),
        figures=markup_of({"rates": rates_by_task(evaluations), "lengths": episode_lengths(evaluations)}),
        pictures=_pictures(evaluated, page_folder),
        provenance=_provenance(evaluations),
        settings=[(evaluation.name, json.dumps(_settings(evaluation), indent=2)) for evaluation in evaluations],
        glossary={**{term: GLOSSARY[term] for term in TERMS}, **wording.GLOSSARY},
    )


def _pairs(evaluations: Sequence[Evaluation]) -> list[wording.Pair]:
    """Each further evaluation with the first, on the episodes that they share."""
    baseline = evaluations[0]
    pairs = [(baseline, variant, pair_success(baseline, variant)) for variant in evaluations[1:]]
    return [(baseline, variant, pair) for baseline, variant, pair in pairs if pair is not None]


def _task_rows(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """One row a task and actor; the first of a task carries its instruction."""
    rows = []
    for task in dict.fromkeys(task for evaluation in evaluations for task in evaluation.by_task):
        actors: list[tuple[str, Sequence[EpisodeRecord], bool]] = []
        for evaluation, controls in zip(evaluations, distinct_controls(evaluations), strict=True):
            actors.append((evaluation.name, evaluation.episodes, False))
            actors += [(name.replace("_", " "), episodes, True) for name, episodes in controls.items()]
        of_task = [(name, [e for e in episodes if e.task == task], control) for name, episodes, control in actors]
        shown = [row for row in of_task if row[1]]
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
    texts = provenance_texts(evaluations[0].details.get("provenance", {}))
    rows = [(label, text) for label, text in texts.items() if text]
    for evaluation in evaluations:
        details = evaluation.details
        rows.append((f"{evaluation.name}: checkpoint", str(details.get("checkpoint") or "none, a controller")))
        if "created_at" in details:
            times = f"{details['wall_s']:.0f} s, {details['cpu_s']:.0f} s of processor time"
            rows.append((f"{evaluation.name}: evaluated", f"{details['created_at']}, in {times}"))
    return rows
