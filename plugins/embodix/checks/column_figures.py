# SPDX-License-Identifier: Apache-2.0
"""What one reading of a column gives: exact statistics, what is not finite, and what never changes in an episode.

N: rows, D: dimensions of a key's vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from embodix.checks.column_reading import QUANTILES, Column, TableRows
from embodix.checks.dataset_tables import statistic
from embodix.checks.findings import Location

NUM_NAMED = 5  # episodes that are named of many


@dataclass(frozen=True)
class ColumnFigures:
    """A column in figures; lists have one value a dimension, over the finite values.

    Attributes:
        dtype, width, num_rows, num_null: of the column.
        num_not_finite: NaN and infinities, by dimension.
        first_not_finite: where the first one is.
        minimum, maximum, mean, std: exact.
        quantiles: ``q01`` to ``q99``, exact.
        outside: share of values outside the recorded q01 to q99; empty where none are recorded.
        num_still: episodes of two rows and more in which no dimension changes.
        still: the first of them.
    """

    dtype: str
    width: int
    num_rows: int
    num_null: int = 0
    num_not_finite: list[int] = field(default_factory=list)
    first_not_finite: Location | None = None
    minimum: list[float] = field(default_factory=list)
    maximum: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    std: list[float] = field(default_factory=list)
    quantiles: dict[str, list[float]] = field(default_factory=dict)
    outside: list[float] = field(default_factory=list)
    num_still: int = 0
    still: list[int] = field(default_factory=list)

    def as_fields(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> ColumnFigures:
        """From the plain values of ``as_fields``."""
        first = fields["first_not_finite"]
        return cls(**{**fields, "first_not_finite": Location(**first) if first else None})


def measure(column: Column, rows: TableRows, recorded: Mapping[str, Any]) -> ColumnFigures:
    """Figures of a column.

    Args:
        column: values of the used rows.
        rows: which rows these are.
        recorded: the data set's own statistics of the key.
    """
    values = column.values_ND
    num_rows, width = values.shape
    plain = {"dtype": column.dtype, "width": width, "num_rows": num_rows, "num_null": column.num_null}
    if not num_rows or num_rows != len(rows.episode_N):
        return ColumnFigures(**plain)
    finite = np.isfinite(values) if values.dtype.kind == "f" else None
    if finite is not None and finite.all():
        finite = None
    num_still, still = _still_episodes(values, rows)
    bounds = [statistic(recorded, name) for name in ("q01", "q99")]
    dimensions = [
        _dimension(values, finite, d, [None if b is None or len(b) != width else b[d] for b in bounds])
        for d in range(width)
    ]
    return ColumnFigures(
        **plain,
        num_not_finite=[0] * width if finite is None else (~finite).sum(axis=0).tolist(),
        first_not_finite=_first(finite, rows),
        minimum=[d["min"] for d in dimensions],
        maximum=[d["max"] for d in dimensions],
        mean=[d["mean"] for d in dimensions],
        std=[d["std"] for d in dimensions],
        quantiles={name: [d[name] for d in dimensions] for name in QUANTILES},
        outside=[d["outside"] for d in dimensions if "outside" in d],
        num_still=num_still,
        still=still,
    )


def _dimension(
    values_ND: np.ndarray, finite_ND: np.ndarray | None, dimension: int, bounds: list[float | None]
) -> dict[str, float]:
    """Statistics of the finite values of one dimension; zeros where there is none."""
    own = values_ND[:, dimension] if finite_ND is None else values_ND[finite_ND[:, dimension], dimension]
    own = own.astype(np.float64)
    if not len(own):
        return dict.fromkeys(("min", "max", "mean", "std", *QUANTILES), 0.0)
    quantiles = np.quantile(own, list(QUANTILES.values()))
    figures = {"min": own.min(), "max": own.max(), "mean": own.mean(), "std": own.std()}
    figures |= dict(zip(QUANTILES, quantiles, strict=True))
    low, high = bounds
    if low is not None and high is not None:
        slack = 1e-6 * max(abs(low), abs(high), 1e-12)  # rounding of the recorded bounds is not outside
        figures["outside"] = float(((own < low - slack) | (own > high + slack)).mean())
    return {name: float(value) for name, value in figures.items()}


def _first(finite_ND: np.ndarray | None, rows: TableRows) -> Location | None:
    if finite_ND is None:
        return None
    row, dimension = np.argwhere(~finite_ND)[0]
    return rows.place(int(row), int(dimension))


def _still_episodes(values_ND: np.ndarray, rows: TableRows) -> tuple[int, list[int]]:
    """Episodes of two rows and more whose values are all equal from row to row."""
    if not len(rows.starts_R):
        return 0, []
    with np.errstate(invalid="ignore"):
        lowest = np.minimum.reduceat(values_ND, rows.starts_R, axis=0)
        highest = np.maximum.reduceat(values_ND, rows.starts_R, axis=0)
    still_R = (lowest == highest).all(axis=1) & (rows.ends_R - rows.starts_R > 1)
    named = rows.episode_N[rows.starts_R[still_R]][:NUM_NAMED]
    return int(still_R.sum()), [int(number) for number in named]
