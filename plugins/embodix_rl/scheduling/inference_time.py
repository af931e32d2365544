# SPDX-License-Identifier: Apache-2.0
"""How long a batch takes to compute, by its size: measured where it was measured, a line elsewhere."""

from __future__ import annotations

from collections import deque
from statistics import fmean

MEMORY = 128  # batches; older ones are forgotten, so a machine that slows down is noticed


class InferenceTime:
    """Seconds of inference as a function of the batch size.

    Sizes measured at least twice give their mean. Others lie on ``alpha + beta * size``, the least-squares line through
    the measurements with neither coefficient negative: a negative slope becomes a constant, a negative intercept a line
    through the origin.
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self._measured: deque[tuple[int, float]] = deque(maxlen=memory)
        self._means: dict[int, float] = {}
        self._line = (0.0, 0.0)
        self._stale = False

    def observe(self, size: int, seconds: float) -> None:
        self._measured.append((size, seconds))
        self._stale = True

    @property
    def sizes(self) -> set[int]:
        """The sizes that were measured at least twice."""
        self._refresh()
        return set(self._means)

    def __call__(self, size: int) -> float:
        if not self._measured:
            raise ValueError("No inference was measured yet.")
        self._refresh()
        alpha, beta = self._line
        return self._means.get(size, alpha + beta * size)

    def _refresh(self) -> None:
        if not self._stale:
            return
        by_size: dict[int, list[float]] = {}
        for size, seconds in self._measured:
            by_size.setdefault(size, []).append(seconds)
        self._means = {size: fmean(values) for size, values in by_size.items() if len(values) >= 2}
        self._line = _line(list(self._measured))
        self._stale = False


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and slope, neither negative."""
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    beta = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    if beta < 0:
        return mean_y, 0.0
    alpha = mean_y - beta * mean_x
    if alpha >= 0:
        return alpha, beta
    return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)
