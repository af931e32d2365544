# SPDX-License-Identifier: Apache-2.0
"""Figures of success in simulation: rates with their intervals, and the length of every episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from embodix.report.evaluation import Evaluation, SuccessRate, distinct_controls, success_by_task
from embodix.report.svg import PAGE, drawing, new_figure, series_colour, to_svg


@dataclass(frozen=True)
class SuccessRow:
    """One line of the figure of rates: ``filled`` for what was trained, open for its controls."""

    label: str
    success: SuccessRate
    series: int
    filled: bool


def success_figure(rows: Sequence[SuccessRow], name: str = "success") -> str | None:
    """Success with 95 % Wilson intervals; None without rows."""
    if not rows:
        return None
    with drawing():
        figure, axes = new_figure(0.75 + 0.3 * len(rows))
        for place, row in enumerate(rows):
            _draw_rate(axes, place, row)
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(-2, 102)
        axes.xaxis.set_major_formatter("{x:g} %")
        axes.set_xlabel("episodes solved")
        axes.grid(axis="y", visible=False)
        return to_svg(figure, name)


def _draw_rate(axes: Axes, place: int, row: SuccessRow) -> None:
    low, high, rate = (100 * value for value in (row.success.low, row.success.high, row.success.rate))
    colour = series_colour(row.series)
    width = 5 if row.filled else 2.5
    axes.plot([low, high], [place, place], color=colour, linewidth=width, alpha=0.35, solid_capstyle="round")
    axes.plot(rate, place, "o", color=colour, markersize=7, markerfacecolor=colour if row.filled else PAGE)


def rates_by_task(evaluations: Sequence[Evaluation]) -> str | None:
    """Each task's success in each evaluation, with its controls."""
    rows = []
    tasks = dict.fromkeys(task for evaluation in evaluations for task in evaluation.by_task)
    controls = distinct_controls(evaluations)
    for task in tasks:
        for series, evaluation in enumerate(evaluations, start=1):
            if task not in evaluation.by_task:
                continue
            label = task if len(evaluations) == 1 else f"{task}, {evaluation.name}"
            rows.append(SuccessRow(label, evaluation.by_task[task], series, True))
            for name, episodes in controls[series - 1].items():
                success = success_by_task(episodes).get(task)
                if success is not None:
                    rows.append(SuccessRow(name.replace("_", " "), success, series, False))
    return success_figure(rows, "tasks")


def episode_lengths(evaluations: Sequence[Evaluation]) -> str | None:
    """One mark an episode at its number of steps: filled where solved; None where no length was recorded."""
    rows = [
        (task, series, evaluation)
        for task in dict.fromkeys(task for evaluation in evaluations for task in evaluation.by_task)
        for series, evaluation in enumerate(evaluations, start=1)
        if any(episode.task == task and episode.num_steps is not None for episode in evaluation.episodes)
    ]
    if not rows:
        return None
    with drawing():
        figure, axes = new_figure(0.75 + 0.34 * len(rows))
        for place, (task, series, evaluation) in enumerate(rows):
            _draw_lengths(axes, place, task, series, evaluation)
        labels = [task if len(evaluations) == 1 else f"{task}, {evaluation.name}" for task, _, evaluation in rows]
        axes.set_yticks(range(len(rows)), labels)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_xlabel("steps of the episode")
        axes.grid(axis="y", visible=False)
        return to_svg(figure, "lengths")


def _draw_lengths(axes: Axes, place: int, task: str, series: int, evaluation: Evaluation) -> None:
    """Solved episodes on the line, the others below it, one beside the other where their lengths are equal."""
    colour, seen = series_colour(series), dict[tuple[int, bool], int]()
    for episode in evaluation.episodes:
        if episode.task != task or episode.num_steps is None:
            continue
        place_of_same = seen.get((episode.num_steps, episode.success), 0)
        seen[episode.num_steps, episode.success] = place_of_same + 1
        offset = (-0.12 if episode.success else 0.18) + 0.03 * (place_of_same % 5) * (-1 if episode.success else 1)
        face = colour if episode.success else PAGE
        axes.plot(episode.num_steps, place + offset, "o", color=colour, markersize=4.5, markerfacecolor=face, alpha=0.8)
