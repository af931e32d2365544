# SPDX-License-Identifier: Apache-2.0
"""The few statistics that reports need: spread of ratios, success intervals, paired success."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_Z_95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution


@dataclass(frozen=True)
class Spread:
    """Median and 5-95 % range of paired values."""

    median: float
    low: float
    high: float
    count: int


def quantile(values: Sequence[float], fraction: float) -> float:
    """Linear-interpolated quantile; ``fraction`` in [0, 1].

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("A quantile needs at least one value; got none.")
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def spread_of(values: Sequence[float]) -> Spread:
    """Median with the 5 % and 95 % quantiles."""
    return Spread(statistics.median(values), quantile(values, 0.05), quantile(values, 0.95), len(values))


def wilson_interval(num_success: int, num_trials: int) -> tuple[float, float]:
    """95 % score interval of a success rate (Wilson 1927), valid near 0 and 1 and for few trials.

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    if num_trials <= 0 or not 0 <= num_success <= num_trials:
        raise ValueError(
            f"A success rate needs 0 <= successes <= trials and at least one trial; got {num_success} of {num_trials}."
        )
    rate = num_success / num_trials
    shrink = 1 + _Z_95**2 / num_trials
    centre = (rate + _Z_95**2 / (2 * num_trials)) / shrink
    half = _Z_95 / shrink * math.sqrt(rate * (1 - rate) / num_trials + _Z_95**2 / (4 * num_trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """Exact two-sided McNemar test on the pairs that disagree; 1.0 when none do."""
    disagreeing = only_first + only_second
    if disagreeing == 0:
        return 1.0
    fewer = min(only_first, only_second)
    tail = float(sum(math.comb(disagreeing, k) for k in range(fewer + 1))) * 0.5**disagreeing
    return min(1.0, 2 * tail)
