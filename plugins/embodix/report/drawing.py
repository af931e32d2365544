# SPDX-License-Identifier: Apache-2.0
"""Matplotlib figures as inline SVG whose colours follow the page, in light, dark and print.

They are drawn with placeholder colours; each becomes a CSS variable of the page, so one figure suits every theme.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
import matplotlib.ticker as ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from embodix.report.steps import PHASES

NUM_SERIES_COLOURS = 6
WIDTH_IN = 7.6
ROLLING_POINTS = 400  # curves with more points are averaged in bins, or they become a smear

INK, MUTED, GRID, PAGE = "#01a001", "#01a002", "#01a003", "#01a004"
SERIES = [f"#01b00{index}" for index in range(NUM_SERIES_COLOURS)]
PHASE_COLOURS = [f"#01c00{index}" for index in range(len(PHASES))]
TOKEN_COLOURS = [f"#01d00{index}" for index in range(3)]
_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    PAGE: "--page",
    **{colour: f"--series-{index}" for index, colour in enumerate(SERIES)},
    **{colour: f"--phase-{index}" for index, colour in enumerate(PHASE_COLOURS)},
    **{colour: f"--token-{index}" for index, colour in enumerate(TOKEN_COLOURS)},
}
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "figure.facecolor": "none",
}


def drawing(style: Any = None) -> AbstractContextManager[None]:
    """Matplotlib in the style of the page, or in another, for a block."""
    return matplotlib.rc_context(_STYLE if style is None else style)


def new_figure(height_in: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    return figure, figure.subplots()


def series_colour(index: int) -> str:
    return SERIES[index % NUM_SERIES_COLOURS]


def to_svg(figure: Figure, name: str) -> str:
    """Render to SVG that scales with the page, carries no outside address and takes the page's colours and font."""
    buffer = io.StringIO()
    with drawing({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1, flags=re.DOTALL)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r'id="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r'xlink:href="#([^"]+)"', rf'xlink:href="#{name}-\1"', text)
    for placeholder, variable in _VARIABLES.items():
        text = text.replace(placeholder, f"var({variable})")
    return text


def legend(axes: Axes, num_entries: int) -> None:
    """A legend above the axes."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=min(4, num_entries), borderaxespad=0)


def whole_steps(axes: Axes) -> None:
    """Ticks at whole steps only."""
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def spans_decades(losses: Sequence[float]) -> bool:
    """Whether a linear axis would flatten the end of training."""
    return min(losses) > 0 and math.isfinite(max(losses)) and max(losses) > 30 * min(losses)


def binned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Average consecutive points so that at most ``ROLLING_POINTS`` remain."""
    width = -(-len(steps) // ROLLING_POINTS)
    chunks = [slice(start, start + width) for start in range(0, len(steps), width)]
    return (
        [sum(steps[c]) / len(steps[c]) for c in chunks],
        [sum(values[c]) / len(values[c]) for c in chunks],
    )
