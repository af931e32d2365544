# SPDX-License-Identifier: Apache-2.0
"""Whether the statistics that a run normalises by are those of its data, and keep the normalised values bounded.

LeRobot's arithmetic: lerobot/processor/normalize_processor.py. It averages the quantiles of episodes into those of the
data set (lerobot/datasets/compute_stats.py, aggregate_feature_stats; https://github.com/huggingface/lerobot/pull/3804).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from embodix.checks.catalogue import found
from embodix.checks.column_figures import ColumnFigures
from embodix.checks.dataset_tables import STATS, statistic
from embodix.checks.findings import Finding, Location
from embodix.checks.run_needs import RunNeeds
from embodix.data.statistics import NEEDED

EXACT = "Use exact ones: dataset.statistics=exact."
EPSILON = 1e-8  # upstream's
LARGE_RMS, LARGE_VALUE = 5.0, 1e3  # of normalised values, which are about 1 where the statistics fit
MANY_OUTSIDE = 0.10  # share outside q01 to q99, which is 0.02 where they fit
SHIFTED = 0.5  # standard deviations that a recorded mean may lie off, or a recorded deviation differ by


def normalised_range(mode: str, stats: Mapping[str, Any], figures: ColumnFigures, bounded: bool) -> np.ndarray | None:
    """``[D, 2]``: root mean square and largest absolute value of each dimension after normalisation.

    None where a statistic is missing or of another width.
    """
    bounds = [statistic(stats, name) for name in NEEDED[mode]]
    if any(values is None or len(values) != figures.width for values in bounds) or not figures.minimum:
        return None
    first, second = (np.asarray(values) for values in bounds)
    shift, scale = (first, second + EPSILON) if mode == "MEAN_STD" else _affine(first, second)
    with np.errstate(over="ignore", invalid="ignore"):
        ends = np.stack([(np.asarray(end) - shift) / scale for end in (figures.minimum, figures.maximum)])
        mean = (np.asarray(figures.mean) - shift) / scale
        rms = np.sqrt(mean**2 + (np.asarray(figures.std) / scale) ** 2)
        largest = np.abs(ends).max(axis=0)
    if bounded:
        unscaled = first == second
        rms, largest = np.where(unscaled, 0.0, rms), np.where(unscaled, 0.0, largest)
    return np.stack([rms, largest], axis=1)


def _affine(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shift and scale of ``2 (x - low) / (high - low) - 1``."""
    span = np.where(high == low, EPSILON, high - low)
    return low + span / 2, span / 2


def normalisation_findings(
    key: str, stats: Mapping[str, Any] | None, figures: ColumnFigures, needs: RunNeeds, whole: bool
) -> Iterator[Finding]:
    """Of one key.

    Args:
        stats: the data set's of the key, None for none.
        whole: whether the figures are of the whole data set, as the statistics are.
    """
    mode = needs.mode_of(key)
    if not mode or needs.statistics == "exact":
        return
    if stats is None:
        yield found("statistics_missing", key, f"{STATS} has none; upstream would train it unnormalised", EXACT)
        return
    broken = list(_broken(key, mode, stats, figures))
    yield from broken
    if broken or not figures.minimum:
        return
    yield from _fitting(key, mode, stats, figures, needs, whole)


def _broken(key: str, mode: str, stats: Mapping[str, Any], figures: ColumnFigures) -> Iterator[Finding]:
    names = NEEDED[mode]
    lacking = [name for name in names if statistic(stats, name) is None]
    if lacking:
        yield found(
            "statistics_name", key, f"{mode} reads {' and '.join(names)}; {STATS} lacks {', '.join(lacking)}", EXACT
        )
        return
    first, second = (np.asarray(statistic(stats, name)) for name in names)
    if {len(first), len(second)} != {figures.width}:
        yield found(
            "statistics_shape",
            key,
            f"{' and '.join(names)} have {len(first)} and {len(second)} values, the data {figures.width}",
            EXACT,
        )
        return
    bad = np.flatnonzero(~np.isfinite(first) | ~np.isfinite(second))
    if len(bad):
        yield found(
            "statistics_not_finite",
            key,
            f"{names[0]} is {first[bad[0]]}, {names[1]} {second[bad[0]]}",
            EXACT,
            Location(dimension=int(bad[0])),
        )
        return
    turned = np.flatnonzero(second < 0 if mode == "MEAN_STD" else second < first)
    if len(turned):
        d = int(turned[0])
        yield found(
            "statistics_inverted",
            key,
            f"{names[0]} is {first[d]:.4g}, {names[1]} {second[d]:.4g}",
            EXACT,
            Location(dimension=d),
        )


def _fitting(
    key: str, mode: str, stats: Mapping[str, Any], figures: ColumnFigures, needs: RunNeeds, whole: bool
) -> Iterator[Finding]:
    others = _of_other_data(stats, figures) if whole else None
    if others is not None:
        dimension, what = others
        yield found("statistics_of_other_data", key, what, EXACT, Location(dimension=dimension))
        return
    outside = np.asarray(figures.outside)
    if mode == "QUANTILES" and len(outside) and outside.max() > MANY_OUTSIDE:
        d = int(outside.argmax())
        yield found(
            "quantiles_averaged",
            key,
            f"{100 * outside[d]:.0f} % of the values lie outside q01 to q99 (2 % should), "
            f"as where quantiles are means of those of episodes",
            EXACT,
            Location(dimension=d),
        )
    ranges = normalised_range(mode, stats, figures, needs.bounded)
    if ranges is None:
        return
    rms, largest = ranges.T
    if rms.max() > LARGE_RMS or largest.max() > LARGE_VALUE:
        d = int(rms.argmax() if rms.max() > LARGE_RMS else largest.argmax())
        low, high = (float(np.asarray(statistic(stats, name))[d]) for name in NEEDED[mode])
        yield found(
            "normalised_large",
            key,
            f"normalised values reach {largest[d]:.3g} (root mean square {rms[d]:.3g}); "
            f"{NEEDED[mode][0]} is {low:.6g}, {NEEDED[mode][1]} {high:.6g}, the data {figures.minimum[d]:.6g} to "
            f"{figures.maximum[d]:.6g}",
            EXACT,
            Location(dimension=d),
        )


def _of_other_data(stats: Mapping[str, Any], figures: ColumnFigures) -> tuple[int, str] | None:
    """A dimension whose recorded mean or deviation is far from the data's; upstream aggregates these two exactly."""
    mean, std = statistic(stats, "mean"), statistic(stats, "std")
    if mean is None or std is None or {len(mean), len(std)} != {figures.width}:
        return None
    spread = np.maximum(np.asarray(figures.std), 1e-6 + 1e-3 * np.abs(figures.mean))
    off = np.abs(mean - np.asarray(figures.mean)) / spread
    ratio = np.abs(std - np.asarray(figures.std)) / spread
    worst = np.maximum(off, ratio)
    d = int(worst.argmax())
    if not worst[d] > SHIFTED:
        return None
    return d, (
        f"recorded mean {mean[d]:.4g} and deviation {std[d]:.4g}, the data have {figures.mean[d]:.4g} and "
        f"{figures.std[d]:.4g}"
    )
