# SPDX-License-Identifier: Apache-2.0
"""Figures of a quantized policy: how far its denoising strays, and how much of each layer's signal is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.ticker as ticker
from matplotlib.axes import Axes

from embodix.report.curves import legend
from embodix.report.svg import MUTED, drawing, new_figure, series_colour, to_svg

LOW, YARDSTICK = 1, 0  # series
LAYER_KINDS = (
    ("weight_db", "weight", 1, "o"),
    ("output_db", "output", 2, "s"),
    ("output_gradient_db", "gradient", 3, "^"),
)
FLOOR = 1e-9  # of a cosine's distance from 1, where a step is exact


def denoising_figure(gate: Mapping[str, Any]) -> str:
    """One minus the cosine after each denoising step, with the rule's threshold and the yardstick."""
    chunk, yardstick = gate["comparison"]["chunk"], gate["yardstick"]["chunk"]
    thresholds = [verdict["threshold"] for verdict in rule(gate, "step_cosine")["verdicts"]]
    name, other = gate["comparison"]["got"], yardstick_words(gate)
    with drawing():
        figure, axes = new_figure(2.9)
        _distance(axes, chunk["worst_by_step"], series_colour(LOW), f"{name}, worst sample", (0, (1, 1.5)))
        _distance(axes, chunk["cosine_by_step"], series_colour(LOW), f"{name}, mean", "-")
        _distance(axes, yardstick["cosine_by_step"], series_colour(YARDSTICK), f"{other}, mean", "-")
        _distance(axes, thresholds, MUTED, "most that is allowed, mean", (0, (4, 3)))
        axes.set(xlabel="denoising step", ylabel="1 − cosine", yscale="log")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        legend(axes, 2)
        return to_svg(figure, "denoising")


def _distance(axes: Axes, cosines: Sequence[float], colour: str, label: str, style: Any) -> None:
    steps = range(1, len(cosines) + 1)
    distances = [max(1 - cosine, FLOOR) for cosine in cosines]
    axes.plot(steps, distances, color=colour, label=label, linestyle=style, marker="o", markersize=4, linewidth=1.6)


def layers_figure(gate: Mapping[str, Any]) -> str | None:
    """SQNR of weight, output and gradient of every computed layer in the order of computation; None without layers."""
    layers = sorted((layer for layer in gate["comparison"]["layers"] if layer["order"]), key=lambda x: x["order"])
    if not layers:
        return None
    other = {layer["path"]: layer for layer in gate["yardstick"]["layers"]}
    kinds = (
        ("weight_db", "weight", 1, "o"),
        ("output_db", "output", 2, "s"),
        ("output_gradient_db", "gradient", 3, "^"),
    )
    with drawing():
        figure, axes = new_figure(3.2)
        for key, label, series, marker in kinds:
            _points(axes, layers, key, series_colour(series), label, marker)
        _points(axes, [other[layer["path"]] for layer in layers], "output_db", series_colour(YARDSTICK),
                f"output, {yardstick_words(gate)}", "s")  # fmt: skip
        limits = {verdict["subject"]: verdict["threshold"] for verdict in rule(gate, "output_sqnr")["verdicts"]}
        drawn = [(layer["order"], limits[layer["path"]]) for layer in layers if layer["path"] in limits]
        axes.plot(*zip(*drawn, strict=True), color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label="least, output")
        axes.set(xlabel="converted layer, in the order of computation", ylabel="SQNR, dB")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        legend(axes, 5)
        return to_svg(figure, "layers")


def _points(axes: Axes, layers: Sequence[Mapping[str, Any]], key: str, colour: str, label: str, marker: str) -> None:
    """Layers whose ratio is a number: neither exact, nor lost, nor not computed."""
    points = [(layer["order"], layer[key]) for layer in layers if isinstance(layer[key], (int, float))]
    if points:
        axes.plot(*zip(*points, strict=True), marker, color=colour, label=label, markersize=4.5, alpha=0.9)


def yardstick_words(gate: Mapping[str, Any]) -> str:
    """The yardstick by the name of what it adds to the reference: bfloat16."""
    return str(gate["yardstick"]["got"])


def rule(gate: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A rule's row."""
    found: Mapping[str, Any] = next(row for row in gate["rules"] if row["name"] == name)
    return found
