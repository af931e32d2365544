# SPDX-License-Identifier: Apache-2.0
"""Declared durations, for studies of scheduling: what a step, a reset, an inference or a training step takes.

Nothing is computed in that time. Numbers that were measured with declared durations say how a schedule behaves, and
nothing about a simulator, a model or a machine.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

KINDS = ("constant", "lognormal")


@dataclass(frozen=True)
class Durations:
    """The distribution of a duration in seconds.

    Attributes:
        mean_s: mean without stragglers.
        kind: ``constant``, or ``lognormal`` with the standard deviation `sigma` of the logarithm and the mean `mean_s`.
        straggler_probability: share of the draws that take `straggler_factor` times as long.

    Raises:
        ValueError: a negative or infinite time, an unknown kind, or a probability outside [0, 1].
    """

    mean_s: float = 0.0
    kind: str = "constant"
    sigma: float = 0.0
    straggler_probability: float = 0.0
    straggler_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"A duration's kind is one of {', '.join(KINDS)}; got {self.kind!r}.")
        for name in ("mean_s", "sigma", "straggler_factor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"A duration's {name} is a finite number from 0 on; got {value}.")
        if not 0 <= self.straggler_probability <= 1:
            raise ValueError(f"straggler_probability is within [0, 1]; got {self.straggler_probability}.")
        if self.kind == "constant" and self.sigma:
            raise ValueError(f"A constant duration has no sigma; got {self.sigma}. Choose kind=lognormal.")

    @classmethod
    def of(cls, settings: Mapping[str, Any] | float) -> Durations:
        """From a config's mapping, or a number of seconds for a constant.

        Raises:
            ValueError: a field that does not exist, or a value out of range.
        """
        if not isinstance(settings, Mapping):
            return cls(mean_s=float(settings))
        known = [field.name for field in fields(cls)]
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise ValueError(f"A duration has no {', '.join(map(str, unknown))}; its fields are {', '.join(known)}.")
        return cls(**settings)

    @property
    def expected_s(self) -> float:
        """Mean with stragglers."""
        return self.mean_s * (1 + self.straggler_probability * (self.straggler_factor - 1))

    def stream(self, seed: Sequence[int]) -> DurationStream:
        """A stream of draws that the seed decides."""
        return DurationStream(self, np.random.default_rng(list(seed)))


class DurationStream:
    """Draws of a distribution, one after the other."""

    def __init__(self, durations: Durations, generator: np.random.Generator) -> None:
        self._durations, self._generator = durations, generator

    def draw(self) -> float:
        """The next duration in seconds. Two numbers are drawn whatever the kind, so that kinds can be compared."""
        durations = self._durations
        normal, uniform = self._generator.standard_normal(), self._generator.random()
        seconds = durations.mean_s
        if durations.kind == "lognormal":
            seconds *= math.exp(durations.sigma * normal - durations.sigma**2 / 2)
        if uniform < durations.straggler_probability:
            seconds *= durations.straggler_factor
        return seconds


@dataclass(frozen=True)
class BatchTime:
    """Seconds that a batch takes by its size: straight lines between declared points, the last line beyond them.

    Attributes:
        points: batch size -> seconds.

    Raises:
        ValueError: no point, a size below 1, or a time that is negative or falls with the size.
    """

    points: Mapping[int, float]

    @classmethod
    def of(cls, points: Mapping[Any, Any]) -> BatchTime:
        """From a config, whose keys may be strings."""
        return cls({int(size): float(seconds) for size, seconds in points.items()})

    def __post_init__(self) -> None:
        sizes = sorted(self.points)
        if not sizes or sizes[0] < 1:
            raise ValueError(f"Times by batch size need sizes from 1 on; got {dict(self.points)}.")
        times = [self.points[size] for size in sizes]
        if times[0] < 0 or any(later < earlier for earlier, later in itertools.pairwise(times)):
            raise ValueError(f"A larger batch takes no less time than a smaller; got {dict(self.points)}.")

    def seconds(self, batch_size: int) -> float:
        """Time of a batch; below the smallest declared size that of the smallest."""
        sizes = sorted(self.points)
        if batch_size <= sizes[0] or len(sizes) == 1:
            return self.points[sizes[0]]
        right = next((index for index, size in enumerate(sizes) if size >= batch_size), len(sizes) - 1)
        low, high = sizes[right - 1], sizes[right]
        slope = (self.points[high] - self.points[low]) / (high - low)
        return self.points[low] + slope * (batch_size - low)


def spend(seconds: float, begun: float | None = None) -> None:
    """Sleep until `seconds` have passed since `begun` (of `time.perf_counter`; now by default)."""
    already = 0.0 if begun is None else time.perf_counter() - begun
    if seconds > already:
        time.sleep(seconds - already)
