# SPDX-License-Identifier: Apache-2.0
"""Mean and deviation of advantages over a global batch, from parts that arrive in any order.

Parts merge by the parallel form of Welford's algorithm (Chan, Golub and LeVeque 1979), which loses no digits where the
mean is large beside the deviation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared differences from the mean, of the valid elements of something."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(values: Iterable[float]) -> Moments:
        """The moments of plain numbers."""
        numbers = list(values)
        if not numbers:
            return Moments()
        mean = math.fsum(numbers) / len(numbers)
        return Moments(len(numbers), mean, math.fsum((number - mean) ** 2 for number in numbers))

    def __add__(self, other: Moments) -> Moments:
        """The moments of both together."""
        count = self.count + other.count
        if not self.count or not other.count:
            return self if self.count else other
        apart = other.mean - self.mean
        share = other.count / count
        return Moments(
            count, self.mean + apart * share, self.squares + other.squares + apart * apart * self.count * share
        )

    def scale(self, epsilon: float = 1e-5) -> Scale:
        """What normalises to mean 0 and deviation 1, with the unbiased deviation that `torch.std` has."""
        deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return Scale(self.mean, deviation + epsilon)


@dataclass(frozen=True)
class Scale:
    """Normalises an advantage: ``(advantage - mean) / deviation``."""

    mean: float = 0.0
    deviation: float = 1.0

    def __call__(self, advantage: float) -> float:
        return (advantage - self.mean) / self.deviation
