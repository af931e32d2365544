# SPDX-License-Identifier: Apache-2.0
"""Confidence intervals of success rates."""

from math import sqrt


def wilson_interval(num_successes: int, num_trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927), 95 % for the default `z`.

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    if not 0 <= num_successes <= num_trials or num_trials == 0:
        raise ValueError(f"A success rate needs 0 <= successes <= trials > 0, got {num_successes} of {num_trials}.")
    rate = num_successes / num_trials
    centre = rate + z**2 / (2 * num_trials)
    spread = z * sqrt(rate * (1 - rate) / num_trials + z**2 / (4 * num_trials**2))
    scale = 1 + z**2 / num_trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
