# SPDX-License-Identifier: Apache-2.0
"""One run that was evaluated while it trained, as a self-contained page: its curves, its checkpoints, its best."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup
from matplotlib.figure import Figure

from embodix.report.drawing import (
    WIDTH_IN,
    binned,
    drawing,
    legend,
    series_colour,
    spans_decades,
    to_svg,
    whole_steps,
)
from embodix.report.evaluation import EvaluationRecord, best_evaluation, read_evaluations
from embodix.report.manifest import write_text_atomically
from embodix.report.page import HTML_NAME, Card, Page, provenance_rows
from embodix.report.runs import Run, low_precision, precision_words, read_run
from embodix.report.steps import StepRecord
from embodix.report.words import count, percent, success_words


def write_run_page(run_folder: Path | str) -> Path:
    """Write `report.html` of an evaluated run into its folder.

    Raises:
        FileNotFoundError, ValueError: the run's records are missing or damaged, or it was never evaluated.
    """
    path = Path(run_folder) / HTML_NAME
    write_text_atomically(path, render_run(read_run(run_folder), read_evaluations(run_folder)))
    return path


def render_run(run: Run, evaluations: Sequence[EvaluationRecord]) -> str:
    """The page as text.

    Raises:
        ValueError: no evaluation.
    """
    best = best_evaluation(evaluations)
    if best is None:
        raise ValueError(f"{run.folder} was not evaluated while it trained; choose evaluation=background.")
    page = Page(
        title=f"Training of {run.name}",
        paragraph=_paragraph(run, evaluations),
        provenance=provenance_rows([run]),
        cards=_cards(run, best, evaluations[-1]),
        figures={"curves": _loss_and_success(run.steps, evaluations)},
        details=[("Resolved configuration", json.dumps(run.manifest.config, indent=2))],
    )
    tasks = list(dict.fromkeys(task for record in evaluations for task in record.by_task))
    return page.render("run.html.j2", best=best, evaluations=evaluations, tasks=tasks)


def _cards(run: Run, best: EvaluationRecord, last: EvaluationRecord) -> list[Card]:
    begun, ended = run.steps[0], run.steps[-1]
    where = Markup("step {}: {}; <code>checkpoints/best</code>").format(best.step, success_words(best.success))
    return [
        Card("Best checkpoint", percent(best.success.rate), where, "good"),
        Card("Last evaluation", percent(last.success.rate), f"step {last.step}: {success_words(last.success)}", "good"),
        Card("Last loss", f"{ended.loss:.3g}", f"from {begun.loss:.3g} at step {begun.step}", "good"),
    ]


def _loss_and_success(steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]) -> str:
    """Loss above, success with its 95 % Wilson interval below, over the same steps."""
    with drawing():
        figure = Figure(figsize=(WIDTH_IN, 4.4), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True)
        upper.plot(*binned([s.step for s in steps], [s.loss for s in steps]), color=series_colour(1), linewidth=1.3)
        upper.set(ylabel="loss")
        if spans_decades([step.loss for step in steps]):
            upper.set_yscale("log")
        at = [record.step for record in evaluations]
        success = [record.success for record in evaluations]
        lower.fill_between(
            at, [100 * s.low for s in success], [100 * s.high for s in success], color=series_colour(2), alpha=0.2, lw=0
        )
        lower.plot(
            at, [100 * s.rate for s in success], "o-", color=series_colour(2), markersize=5, label="all episodes"
        )
        tasks = list(dict.fromkeys(task for record in evaluations for task in record.by_task))
        for index, task in enumerate(tasks if len(tasks) > 1 else []):
            points = [(r.step, 100 * r.by_task[task].rate) for r in evaluations if task in r.by_task]
            lower.plot(*zip(*points, strict=True), linewidth=1, color=series_colour(3 + index), label=task)
        lower.set(xlabel="step", ylabel="episodes solved, %", ylim=(-4, 104))
        whole_steps(lower)
        if len(tasks) > 1:
            legend(lower, 1 + len(tasks))
        return to_svg(figure, "curves")


def _paragraph(run: Run, evaluations: Sequence[EvaluationRecord]) -> str:
    config = run.manifest.config
    policy, dataset = config.get("policy") or {}, config.get("dataset") or {}
    data = f" on the dataset {dataset['repo_id']}" if dataset.get("repo_id") else ""
    precision = f", matrix products in {precision_words(run)}" if low_precision(run) else ""
    return (
        f"The policy {policy.get('type', 'that was configured')} trained for "
        f"{count(run.steps[-1].step, 'step')}{data}, seed {run.manifest.seed}{precision}. "
        f"{count(len(evaluations), 'checkpoint')} were rolled out in the simulator by processes of their own "
        "while training went on. Their episodes chose the best checkpoint, so its success here is optimistic: "
        "evaluate it on other seeds before you state it."
    )
