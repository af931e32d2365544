# SPDX-License-Identifier: Apache-2.0
"""Statistics over all frames in place of LeRobot's aggregates, with which normalised values stay bounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embodix.checks.column_figures import ColumnFigures
from embodix.checks.dataset_reading import read_dataset
from embodix.data.joined_columns import VECTORS, Join

NARROW = 1e-3  # of a dimension's full range: quantiles nearer than this to each other divide by next to nothing
FLAT = 1e-6  # of a dimension's magnitude: a full range below this is rounding


def exact_statistics(figures: ColumnFigures) -> dict[str, np.ndarray]:
    """Statistics of a key under LeRobot's names, each ``[D]``, and ``count``.

    Where a dimension is (nearly) always the same, a pair of bounds is no scale: it is widened to the full range, and
    where that is rounding, too, to 1 around the value, so that what is normalised stays within about 1 and a value that
    is off by rounding stays there. The deviation of such a dimension is 1.
    """
    low, high = np.asarray(figures.minimum), np.asarray(figures.maximum)
    flat = high - low <= FLAT * np.maximum(np.abs(low), np.abs(high))
    low, high = np.where(flat, low - 1.0, low), np.where(flat, high + 1.0, high)
    statistics = {"min": low, "max": high, "mean": np.asarray(figures.mean)}
    statistics["std"] = np.where(flat, 1.0, np.asarray(figures.std))
    statistics |= {name: np.asarray(values) for name, values in figures.quantiles.items()}
    for lower, upper in (("q01", "q99"), ("q10", "q90")):
        narrow = flat | (statistics[upper] - statistics[lower] <= NARROW * (high - low))
        statistics[lower] = np.where(narrow, low, statistics[lower])
        statistics[upper] = np.where(narrow, high, statistics[upper])
    return {**statistics, "count": np.asarray([figures.num_rows])}


def exact_statistics_of(
    root: Path, episodes: Sequence[int] | None, join: Join, recorded: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Statistics of a data set with those of its numeric keys over all frames; those of images are kept.

    They are computed once and kept with the reading of the data set.

    Args:
        root: its folder.
        episodes: numbers of those that are used, None for all.
        join: keys that are made of several columns.
        recorded: the data set's own.

    Raises:
        ValueError: its metadata can't be read.
    """
    reading = read_dataset(root, episodes, "none", join)
    if not reading.figures:
        raise ValueError(
            f"dataset.statistics=exact reads all frames of {root}, which can't be read: "
            + "; ".join(finding.sentence for finding in reading.findings)
        )
    vectors = [key for key in VECTORS if key in reading.tables.features]
    unread = [key for key in vectors if key not in reading.figures or reading.figures[key].num_null]
    if unread:
        own = [finding.sentence for finding in reading.findings if finding.key in unread]
        reasons = "; ".join(own or [f"{key}: values are missing" for key in unread])
        raise ValueError(f"dataset.statistics=exact reads all states and actions of {root}, which it can't: {reasons}.")
    exact = {key: exact_statistics(figures) for key, figures in reading.figures.items() if figures.minimum}
    return {key: dict(values) for key, values in {**recorded, **exact}.items()}
