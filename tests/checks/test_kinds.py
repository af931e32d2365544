# SPDX-License-Identifier: Apache-2.0
"""Every kind of the catalogue, planted in a copy of a sound data set, is named, with its place; a second, unlike member
of a kind is planted where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodix.checks.catalogue import KINDS
from embodix.checks.dataset_check import check_dataset
from embodix.checks.dataset_reading import read_dataset
from embodix.checks.findings import CheckReport, Finding
from embodix.checks.run_needs import RunNeeds
from embodix.testing.damaged_datasets import IN_VIDEO, PLANTED, QUANTILES, STATE, Damage, Plant


def look(root: Path, wanted: RunNeeds = QUANTILES, **options: Any) -> CheckReport:
    return check_dataset("set", read_dataset(root, **options), wanted)


def named(report: CheckReport, kind: str) -> Finding:
    found = [finding for finding in report.findings if finding.kind == kind]
    assert found, f"{kind} is not among {[finding.sentence for finding in report.findings]}"
    return found[0]


@pytest.mark.parametrize(
    ("kind", "plant", "words", "wanted"), PLANTED, ids=[f"{n}-{p[0]}" for n, p in enumerate(PLANTED)]
)
def test_a_planted_kind_is_named(damaged: Damage, kind: str, plant: Plant, words: str, wanted: RunNeeds) -> None:
    plant(damaged)
    finding = named(look(damaged.root, wanted), kind)
    assert words in finding.sentence
    assert finding.remedy
    assert not [other.sentence for other in look(damaged.root, wanted).findings if other.kind not in KINDS]


@pytest.mark.parametrize(("kind", "plant", "words"), IN_VIDEO, ids=[p[0] for p in IN_VIDEO])
def test_a_kind_of_videos_is_named(damaged_video: Damage, kind: str, plant: Plant, words: str) -> None:
    plant(damaged_video)
    assert words in named(look(damaged_video.root), kind).sentence


def test_episodes_that_do_not_exist_are_named(image_set: Path) -> None:
    report = look(image_set, episodes=[1, 7])
    assert "7 does not exist" in named(report, "episode_unknown").sentence
    assert not look(image_set, episodes=[1, 2]).findings


def test_what_unused_episodes_hold_is_nobodys_business(damaged: Damage) -> None:
    damaged.values(STATE, 30, 2, float("nan"))
    assert named(look(damaged.root), "not_finite")
    assert "not_finite" not in [finding.kind for finding in look(damaged.root, episodes=[0, 2]).findings]


def test_every_kind_of_the_catalogue_is_planted() -> None:
    planted = {kind for kind, *_ in PLANTED} | {kind for kind, *_ in IN_VIDEO} | {"episode_unknown"}
    assert planted == set(KINDS)
    assert len(planted) >= 30


def test_figures_are_exact(image_set: Path) -> None:
    """Against numpy over the table, and the places of the worst dimension."""
    import pyarrow.parquet as pq

    reading = read_dataset(image_set)
    values = np.stack(pq.read_table(image_set / "data/chunk-000/file-000.parquet").column(STATE).to_pylist())
    figures = reading.figures[STATE]
    np.testing.assert_allclose(figures.mean, values.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(figures.std, values.std(axis=0), rtol=1e-6)
    for name, share in (("q01", 0.01), ("q50", 0.5), ("q99", 0.99)):
        np.testing.assert_allclose(figures.quantiles[name], np.quantile(values, share, axis=0), atol=1e-6)
