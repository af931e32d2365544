# SPDX-License-Identifier: Apache-2.0
"""Figures of comparisons and of success in simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from embodix.report.compare import CompareReport, common_steps, relative_difference
from embodix.report.drawing import (
    INK,
    MUTED,
    PAGE,
    PHASE_COLOURS,
    TOKEN_COLOURS,
    WIDTH_IN,
    binned,
    drawing,
    legend,
    new_figure,
    series_colour,
    spans_decades,
    to_svg,
    whole_steps,
)
from embodix.report.evaluation import Evaluation, SuccessRate, distinct_controls, success_by_task
from embodix.report.steps import PHASES
from embodix.report.words import PHASE_NAMES


def loss_curves(report: CompareReport) -> str:
    """Loss over steps, all variants on one axis; the baseline is broad so that curves on top of it stay visible."""
    with drawing():
        figure, axes = new_figure(2.9)
        for index, run in enumerate(report.runs):
            steps, losses = binned([s.step for s in run.steps], [s.loss for s in run.steps])
            axes.plot(
                steps,
                losses,
                color=series_colour(index),
                linewidth=4.5 if index == 0 else 1.3,
                alpha=0.45 if index == 0 else 1.0,
                linestyle="-" if index < 2 else (0, (4, 1.5 + index)),
                label=run.name,
                solid_capstyle="round",
            )
        axes.set(xlabel="step", ylabel="loss")
        if spans_decades([step.loss for run in report.runs for step in run.steps]):
            axes.set_yscale("log")
        whole_steps(axes)
        legend(axes, len(report.runs))
        return to_svg(figure, "loss")


def loss_differences(report: CompareReport) -> str:
    """Relative loss difference to the baseline, logarithmic; steps that agree to the last bit lie on the floor."""
    series = [
        (
            index,
            pair.name,
            [(a.step, relative_difference(b.loss, a.loss)) for a, b in common_steps(report.runs[0], run)],
        )
        for index, (pair, run) in enumerate(zip(report.pairs, report.runs[1:], strict=True), start=1)
        if pair.same_samples
    ]
    positive = [value for _, _, points in series for _, value in points if 0 < value < float("inf")]
    floor = 10 ** (-9) if not positive else min(1e-8, min(positive) / 3)
    with drawing():
        figure, axes = new_figure(2.3)
        for index, name, points in series:
            steps, values = zip(*points, strict=True)
            drawn = [min(max(value, floor), 1e3) for value in values]
            size = 5 if len(steps) <= 100 else 2.5
            axes.plot(steps, drawn, ".", color=series_colour(index), markersize=size, alpha=0.85, label=name)
        tolerance = report.pairs[0].tolerance
        axes.axhline(tolerance, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"rounding at the first step: {tolerance:.0e}",
            (1, tolerance),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            color=MUTED,
        )
        if any(value == 0 for _, _, points in series for _, value in points):
            axes.annotate("bit-equal", (0, floor), xycoords=("axes fraction", "data"), xytext=(2, 4),
                          textcoords="offset points", color=MUTED)  # fmt: skip
        axes.set(xlabel="step", ylabel="relative difference", yscale="log")
        axes.set_ylim(floor / 2, max([*positive, tolerance]) * 10)
        whole_steps(axes)
        if len(series) > 1:
            legend(axes, len(series))
        return to_svg(figure, "difference")


def phase_times(report: CompareReport) -> str:
    """Mean time of a step by phase, stacked: process CPU time on the left, wall-clock time on the right."""
    names = [variant.name for variant in report.variants]
    with drawing():
        figure = Figure(figsize=(WIDTH_IN, 1.15 + 0.36 * len(names)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, clock, label in ((left, "cpu_s", "process CPU time"), (right, "wall_s", "wall-clock time")):
            starts = [0.0] * len(names)
            for colour, phase in zip(PHASE_COLOURS, PHASES, strict=True):
                widths = [1000 * getattr(variant, clock)[phase] for variant in report.variants]
                axes.barh(names, widths, left=starts, height=0.62, color=colour, label=PHASE_NAMES[phase],
                          edgecolor=PAGE, linewidth=0.8)  # fmt: skip
                starts = [start + width for start, width in zip(starts, widths, strict=True)]
            for row, total in enumerate(starts):
                axes.annotate(f"{total:.3g}", (total, row), xytext=(4, 0), textcoords="offset points", va="center")
            axes.set_xlabel(f"{label}, ms a step")
            axes.set_xlim(0, max(starts) * 1.16 or 1)
            axes.grid(axis="y", visible=False)
        left.invert_yaxis()
        figure.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=len(PHASES),
                      handlelength=1, columnspacing=1.2)  # fmt: skip
        return to_svg(figure, "phases")


def speed_ratios(report: CompareReport) -> str:
    """Median and 5-95 % of the paired ratios, with the bounds as open marks."""
    rows = [
        (pair, words, spread)
        for pair in report.pairs
        if pair.same_samples
        for words, spread in (("whole step", pair.step_ratio), ("forward + backward", pair.compute_ratio))
        if spread is not None
    ]
    order = [run.name for run in report.runs]
    with drawing():
        figure, axes = new_figure(0.95 + 0.34 * max(1, len(rows)))
        for row, (pair, _, spread) in enumerate(rows):
            colour = series_colour(order.index(pair.name))
            axes.plot([spread.low, spread.high], [row, row], color=colour, linewidth=5, alpha=0.35,
                      solid_capstyle="round")  # fmt: skip
            axes.plot(spread.median, row, "o", color=colour, markersize=7)
            axes.annotate(f"{spread.median:.2f}×", (spread.median, row), xytext=(0, 6), textcoords="offset points",
                          ha="center", color=INK)  # fmt: skip
            _mark_bounds(axes, pair, row, first=row == 0)
        axes.axvline(1, color=MUTED, linewidth=1)
        axes.set_yticks(
            range(len(rows)), [_ratio_label(pair.name, words, len(report.pairs)) for pair, words, _ in rows]
        )
        axes.set_ylim(len(rows) - 0.5, -0.75)
        axes.set_xlabel(f"times faster than {report.baseline}")
        axes.xaxis.set_major_formatter("{x:g}×")
        axes.grid(axis="y", visible=False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, handletextpad=0.2, borderaxespad=0)
        return to_svg(figure, "ratios")


def tokens_per_sample(report: CompareReport) -> str | None:
    """Tokens a sample: valid, padding that is computed, and upstream's padding that is left out."""
    counted = [variant for variant in report.variants if variant.tokens_computed is not None]
    if not counted:
        return None
    names = [variant.name for variant in counted]
    parts = (
        ("valid", [variant.tokens_valid or 0.0 for variant in counted]),
        ("padding, computed", [(v.tokens_computed or 0.0) - (v.tokens_valid or 0.0) for v in counted]),
        ("left out", [max(0.0, (v.tokens_upstream or 0.0) - (v.tokens_computed or 0.0)) for v in counted]),
    )
    with drawing():
        figure, axes = new_figure(1.05 + 0.36 * len(names))
        starts = [0.0] * len(names)
        for (label, widths), colour in zip(parts, TOKEN_COLOURS, strict=True):
            axes.barh(names, widths, left=starts, height=0.62, color=colour, edgecolor=PAGE, linewidth=0.8,
                      label=label, hatch="////" if label == "left out" else None)  # fmt: skip
            for row, (start, width) in enumerate(zip(starts, widths, strict=True)):
                if width > 0.06 * max(variant.tokens_upstream or 1.0 for variant in counted):
                    axes.annotate(f"{width:.0f}", (start + width / 2, row), ha="center", va="center",
                                  color=INK if label == "left out" else PAGE)  # fmt: skip
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("tokens a sample")
        axes.grid(axis="y", visible=False)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, handlelength=1, borderaxespad=0)
        return to_svg(figure, "tokens")


def success_rates(report: CompareReport) -> str | None:
    """Success with 95 % Wilson intervals: variants filled, their controls open."""
    rows = []
    for index, variant in enumerate(report.variants):
        if variant.evaluation is not None:
            rows.append(SuccessRow(variant.name, variant.evaluation.success, index, True))
            for name, control in variant.evaluation.controls.items():
                rows.append(SuccessRow(f"{variant.name}, {name.replace('_', '-')} control", control, index, False))
    return success_figure(rows)


def _mark_bounds(axes: Axes, pair: Any, row: int, first: bool) -> None:
    marks = []
    if pair.bound is not None:
        marks = [("D", pair.bound.this_size, "FLOP bound at this size"), ("s", pair.bound.real_size, "at real size")]
    elif pair.flop_ratio is not None:
        marks = [("D", pair.flop_ratio, "counted FLOP ratio")]
    for marker, value, label in marks:
        if value is not None:
            axes.plot(value, row, marker, color=INK, markerfacecolor=PAGE, markersize=6, linestyle="none",
                      label=label if first else None)  # fmt: skip


def _ratio_label(name: str, words: str, num_pairs: int) -> str:
    return words if num_pairs == 1 else f"{name}, {words}"


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
