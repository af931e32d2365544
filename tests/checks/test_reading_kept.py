# SPDX-License-Identifier: Apache-2.0
"""A data set is read once: what was kept says the same, and any change is read anew."""

from __future__ import annotations

import pytest

from embodix.checks.dataset_check import check_dataset
from embodix.checks.dataset_reading import read_dataset
from embodix.testing.damaged_datasets import QUANTILES, Damage


def test_a_second_check_reads_nothing_and_says_the_same(damaged: Damage) -> None:
    damaged.values("observation.state", 31, 1, float("nan"))
    first, second = (read_dataset(damaged.root) for _ in range(2))
    assert first.seconds > 0
    assert second.seconds == 0
    reports = [check_dataset("set", reading, QUANTILES) for reading in (first, second)]
    assert reports[0].findings == reports[1].findings
    assert reports[0].keys == reports[1].keys
    assert second.figures == first.figures


def test_another_policy_judges_what_was_kept(damaged: Damage) -> None:
    """A reading knows no policy: what is wrong for one is found in the reading made for another."""
    read_dataset(damaged.root)
    reading = read_dataset(damaged.root)
    assert reading.seconds == 0
    assert not check_dataset("set", reading, QUANTILES).findings
    from dataclasses import replace

    assert [f.kind for f in check_dataset("set", reading, replace(QUANTILES, chunk=99)).findings] == ["episode_short"]


@pytest.mark.parametrize("change", ["data", "metadata", "episodes", "join"])
def test_what_changed_is_read_anew(damaged: Damage, change: str) -> None:
    read_dataset(damaged.root)
    options: dict[str, object] = {}
    if change == "data":
        damaged.values("action", 3, 0, 0.25)
    elif change == "metadata":
        damaged.stats("action", q01=[-9.0] * 4)
    elif change == "episodes":
        options["episodes"] = [0, 1]
    else:
        options["join"] = {"action": ["action", "observation.state"]}
    reading = read_dataset(damaged.root, **options)  # type: ignore[arg-type]
    assert reading.seconds > 0
