# SPDX-License-Identifier: Apache-2.0
"""Figures of a bench of `lerobot rl`."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from embodix.report.drawing import GRID, INK, MUTED, PAGE, WIDTH_IN, drawing, new_figure, series_colour, to_svg
from embodix_rl.report.rl_bench import BenchReport, VariantResult
from embodix_rl.report.spans import (
    ACTIVITIES,
    ENVIRONMENTS,
    INFER,
    INFERENCE,
    NOBODY,
    RESET,
    STEP,
    TRAIN,
    TRAINING,
    WEIGHTS,
    Piece,
    component_of,
    pieces,
    workers_of,
)

COLOURS = {
    STEP: series_colour(3),
    RESET: series_colour(5),
    INFER: series_colour(1),
    TRAIN: series_colour(2),
    WEIGHTS: series_colour(4),
}
WAIT_COLOURS = {
    ENVIRONMENTS: COLOURS[STEP],
    INFERENCE: COLOURS[INFER],
    TRAINING: COLOURS[TRAIN],
    WEIGHTS: COLOURS[WEIGHTS],
    NOBODY: MUTED,
}
WAIT_ALPHA = 0.28
NAME_WIDTH = 24  # characters
LEAST_GAP = 0.0007  # of a timeline, for two bars not to be drawn as one
LEAST_SHARE = 0.002  # of a worker's time, for an activity to get a row of its own
WORDS = {STEP: "stepping", RESET: "resetting", INFER: "inference", TRAIN: "training", WEIGHTS: "weights"}
NAMES = {ENVIRONMENTS: "environment", INFERENCE: "inference", TRAINING: "training"}


def rates_figure(report: BenchReport) -> str:
    """Fresh frames a second, with the bound of the parts and what the scheduling model predicts."""
    results = report.results
    is_reused = any(result.rates.reuse > 1 for result in results)
    with drawing():
        figure, axes = new_figure(1.0 + 0.36 * len(results))
        for row, result in enumerate(results):
            fresh, trained = result.rates.fresh_frames_per_s, result.rates.trained_frames_per_s
            again = max(trained - fresh, 0.0)
            axes.barh(row, fresh, height=0.6, color=series_colour(1), label="fresh frames" if not row else None)
            axes.barh(row, again, left=fresh, height=0.6, facecolor="none", edgecolor=MUTED, linewidth=0.8,
                      hatch="////", label="trained again" if is_reused and not row else None)  # fmt: skip
            bound = result.bound_frames_per_s
            axes.plot([bound, bound], [row - 0.36, row + 0.36], color=INK, linewidth=1.8,
                      label="bound of the parts" if not row else None)  # fmt: skip
            predicted = result.entry.predicted_frames_per_s
            if predicted is not None:
                axes.plot(predicted, row, "D", color=INK, markerfacecolor=PAGE, markersize=5.5, linestyle="none")
        if any(result.entry.predicted_frames_per_s is not None for result in results):
            axes.plot([], [], "D", color=INK, markerfacecolor=PAGE, linestyle="none", label="scheduling model")
        axes.set_yticks(range(len(results)), [_wrapped(result.name) for result in results])
        axes.set_ylim(len(results) - 0.45, -0.55)
        axes.set_xlabel("frames a second")
        axes.grid(axis="y", visible=False)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=4, columnspacing=1.2)
        return to_svg(figure, "rates")


def shares_figure(report: BenchReport) -> str:
    """Where the time of each component goes, the mean over its workers: strong its work, pale what it waited for."""
    rows = [
        (result.name if not place else "", component, own)
        for result in report.results
        for place, (component, own) in enumerate(result.components.items())
    ]
    with drawing():
        figure, axes = new_figure(1.2 + 0.2 * len(rows))
        for row, (_, _, own) in enumerate(rows):
            at = _row_position(rows, row)
            start = 0.0
            for label, colour, alpha in _segments():
                width = 100 * own.get(label, 0.0)
                if width:
                    axes.barh(at, width, left=start, height=0.78, color=colour, alpha=alpha, linewidth=0)
                    start += width
        positions = [_row_position(rows, row) for row in range(len(rows))]
        labels = [f"{_wrapped(name)}   {NAMES[component]}" if name else NAMES[component] for name, component, _ in rows]
        axes.set_yticks(positions, labels)
        axes.set_ylim(max(positions) + 0.6, -0.6)
        axes.set_xlim(0, 100)
        axes.set_xlabel("of the time after warm-up, %")
        axes.grid(axis="y", visible=False)
        used = {label for _, _, own in rows for label, share in own.items() if share > 0.002}
        figure.legend(handles=_legend(used), loc="outside upper left", ncols=4, handlelength=1, columnspacing=1.2)
        return to_svg(figure, "shares")


def _row_position(rows: Sequence[tuple[str, str, object]], row: int) -> float:
    """A gap before each further variant."""
    return row + 0.7 * sum(bool(name) for name, _, _ in rows[1 : row + 1])


def _segments() -> list[tuple[str, str, float]]:
    own = [(activity, COLOURS[activity], 1.0) for activity in ACTIVITIES]
    return own + [(f"waits for {whom}", colour, WAIT_ALPHA) for whom, colour in WAIT_COLOURS.items()]


def _legend(used: set[str]) -> list[Patch]:
    return [
        Patch(facecolor=colour, alpha=alpha, label=WORDS.get(label, label))
        for label, colour, alpha in _segments()
        if label in used
    ]


def staleness_figure(report: BenchReport) -> str:
    """Age of the frames that were trained on, in policy versions."""
    results = report.results
    ages = sorted({age for result in results for age in result.rates.staleness})
    with drawing():
        figure, axes = new_figure(0.9 + 0.3 * len(results))
        for row, result in enumerate(results):
            start = 0.0
            for index, age in enumerate(ages):
                width = 100 * result.rates.staleness.get(age, 0.0)
                alpha = 1 - 0.75 * index / max(len(ages) - 1, 1)
                label = (f"{age} version{'' if age == 1 else 's'}") if not row else None
                axes.barh(row, width, left=start, height=0.62, color=series_colour(1), alpha=alpha, label=label,
                          edgecolor=PAGE, linewidth=0.8)  # fmt: skip
                start += width
        axes.set_yticks(range(len(results)), [_wrapped(result.name) for result in results])
        axes.set_ylim(len(results) - 0.45, -0.55)
        axes.set_xlim(0, 100)
        axes.set_xlabel("of the trained frames, %")
        axes.grid(axis="y", visible=False)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=6, columnspacing=1.2)
        return to_svg(figure, "staleness")


def timeline_window(report: BenchReport) -> float:
    """Seconds that the timelines show."""
    if report.timeline_s is not None:
        return report.timeline_s
    first = report.results[0].counted[:2]
    return first[-1].end_s - first[0].begin_s


def gantt_figure(result: VariantResult, seconds: float, name: str) -> str:
    """One row for each worker and activity from the end of warm-up on; pale what the worker waited for."""
    begin = result.counted[0].begin_s
    end = min(begin + seconds, result.steps[-1].end_s)
    timed = pieces(result.spans, begin, end)
    rows = _gantt_rows(result, timed)
    with drawing():
        figure, axes = new_figure(0.75 + 0.2 * len(rows))
        for row, (worker, activity, _) in enumerate(rows):
            for colour, bars in _bars(timed, worker, activity, begin, seconds * LEAST_GAP):
                axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, linewidth=0,
                                 alpha=1.0 if activity else WAIT_ALPHA)  # fmt: skip
        for row in range(1, len(rows)):
            if rows[row][0] != rows[row - 1][0]:
                axes.axhline(row - 0.5, color=GRID, linewidth=0.8)
        for step in result.counted:
            if begin < step.end_s < end:
                axes.axvline(step.end_s - begin, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_yticks(range(len(rows)), [label for _, _, label in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, seconds)
        axes.set_xlabel("seconds after warm-up")
        axes.grid(axis="y", visible=False)
        return to_svg(figure, name)


def _gantt_rows(result: VariantResult, timed: Sequence[Piece]) -> list[tuple[str, str | None, str]]:
    """Worker, activity (None for what it waits for) and label."""
    rows: list[tuple[str, str | None, str]] = []
    for worker in workers_of(result.spans):
        seconds: Counter[str | None] = Counter()
        for piece in timed:
            if piece.worker == worker:
                seconds[piece.activity] += piece.seconds  # type: ignore[assignment]
        own = {activity for activity, total in seconds.items() if total >= LEAST_SHARE * sum(seconds.values())}
        title = f"{NAMES[component_of(worker)]} {worker.rpartition(':')[2]}"
        activities = [activity for activity in ACTIVITIES if activity in own]
        rows += [(worker, activity, f"{title}  {WORDS[activity]}") for activity in activities]
        if None in own:
            rows.append((worker, None, f"{title}  waits"))
    return rows


def _bars(
    timed: Sequence[Piece], worker: str, activity: str | None, begin: float, least_gap: float
) -> list[tuple[str, list[tuple[float, float]]]]:
    bars: dict[str, list[tuple[float, float]]] = {}
    for piece in timed:
        if piece.worker == worker and piece.activity == activity:
            colour = COLOURS[activity] if activity else WAIT_COLOURS[str(piece.waits_for)]
            own = bars.setdefault(colour, [])
            start, before = piece.begin_s - begin, own[-1] if own else None
            if before is not None and start - sum(before) < least_gap:
                own[-1] = (before[0], piece.end_s - begin - before[0])
            else:
                own.append((start, piece.seconds))
    return list(bars.items())


def _wrapped(name: str) -> str:
    """A long name in lines, broken at its underscores."""
    return "\n".join(textwrap.wrap(name.replace("_", "_ "), NAME_WIDTH)).replace("_ ", "_")


def gantt_legend() -> str:
    """The colours of all timelines."""
    with drawing():
        figure = Figure(figsize=(WIDTH_IN, 0.7))
        handles = _legend({label for label, _, _ in _segments()})
        figure.legend(handles=handles, loc="center left", ncols=4, handlelength=1, columnspacing=1.0)
        return to_svg(figure, "timeline-legend")


def progress_figure(report: BenchReport) -> str | None:
    """Success and return against fresh frames on the left and against wall clock on the right; None without either."""
    curves = {result.name: result.progress() for result in report.results}
    labels = list(dict.fromkeys(label for own in curves.values() for label in own))
    if not labels:
        return None
    with drawing():
        figure = Figure(figsize=(WIDTH_IN, 0.6 + 2.1 * len(labels)), layout="constrained")
        grid = figure.subplots(len(labels), 2, squeeze=False, sharey="row")
        for (left, right), label in zip(grid, labels, strict=True):
            for index, (name, own) in enumerate(curves.items()):
                frames, seconds, values = zip(*own.get(label, [(float("nan"),) * 3]), strict=True)
                style = {"color": series_colour(index), "linewidth": 1.3, "markersize": 3.5}
                dashes = "-" if index < 6 else "--"
                left.plot(frames, values, marker="o", linestyle=dashes, label=name, **style)
                right.plot(seconds, values, marker="o", linestyle=dashes, **style)
            left.set(ylabel=label, xlabel="fresh frames")
            right.set(xlabel="seconds since training began")
        handles, names = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=4, columnspacing=1.2)
        return to_svg(figure, "progress")
