# SPDX-License-Identifier: Apache-2.0
"""The few statistics that reports need: spread of ratios, success intervals, paired success and its difference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
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
    from scipy.stats import binomtest  # imports slowly

    interval = binomtest(num_success, num_trials).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """Exact two-sided McNemar test on the pairs that disagree; 1.0 when none do."""
    if only_first + only_second == 0:
        return 1.0
    from scipy.stats import binomtest  # imports slowly

    return float(binomtest(only_first, only_first + only_second, 0.5).pvalue)


def paired_difference_interval(only_first: int, only_second: int, num_pairs: int) -> tuple[float, float]:
    """95 % score interval of the difference of two success rates on the same trials, first minus second.

    The differences that the score test with the restricted maximum-likelihood variance does not reject: T. Tango,
    "Equivalence test and confidence interval for the difference in proportions for the paired-sample design",
    Statistics in Medicine 17 (1998) 891-908. It is valid for few trials, for rates near 0 and 1, and has a width
    where no pair disagrees.

    Args:
        only_first: pairs that only the first solves.
        only_second: pairs that only the second solves.
        num_pairs: all pairs.

    Raises:
        ValueError: no pairs, or more that disagree than there are.
    """
    if num_pairs <= 0 or min(only_first, only_second) < 0 or only_first + only_second > num_pairs:
        raise ValueError(
            "A paired difference needs at least one pair and no more disagreeing pairs than pairs; got "
            f"{only_first} and {only_second} of {num_pairs}."
        )
    estimate = (only_first - only_second) / num_pairs

    def statistic(difference: float) -> float:
        return _tango_statistic(difference, only_first, only_second, num_pairs)

    low = -1.0 if estimate == -1.0 else _falling_root(lambda d: statistic(d) - _Z_95, -1.0, estimate)
    high = 1.0 if estimate == 1.0 else _falling_root(lambda d: statistic(d) + _Z_95, estimate, 1.0)
    return low, high


def _tango_statistic(difference: float, only_first: int, only_second: int, num_pairs: int) -> float:
    """Standard normal where ``difference`` is true; falls with it."""
    linear = (2 * num_pairs - only_first + only_second) * difference - only_first - only_second
    constant = -only_second * difference * (1 - difference)
    root = math.sqrt(max(0.0, linear**2 - 8 * num_pairs * constant))
    second_rate = (root - linear) / (4 * num_pairs)  # of pairs that only the second solves, given the difference
    variance = num_pairs * (2 * second_rate + difference * (1 - difference))
    distance = only_first - only_second - num_pairs * difference
    if distance == 0.0:
        return 0.0
    return distance / math.sqrt(variance) if variance > 0.0 else math.copysign(math.inf, distance)


def _falling_root(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function passes zero between ``low`` and ``high``, by bisection."""
    for _ in range(60):
        middle = (low + high) / 2
        if function(middle) > 0.0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
