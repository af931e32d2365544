# SPDX-License-Identifier: Apache-2.0
"""Curves over training steps: what their axes and their points have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib.ticker as ticker
from matplotlib.axes import Axes

ROLLING_POINTS = 400  # curves with more points are averaged in bins, or they become a smear


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
