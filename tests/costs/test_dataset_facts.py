# SPDX-License-Identifier: Apache-2.0
"""A plan reads the statistics that training will normalise with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodix.costs.dataset_facts import read_dataset_facts
from embodix.costs.workload import read_sources
from embodix.data.column_reads import read_columns
from embodix.testing.datasets import write_dataset

EXACT = {"statistics": "exact"}


@pytest.fixture
def astray(tmp_path: Path) -> Path:
    """A data set whose recorded quantiles of the state are not its own."""
    root = write_dataset(tmp_path / "astray")
    path = root / "meta/stats.json"
    stats = json.loads(path.read_text())
    stats["observation.state"]["q01"], stats["observation.state"]["q99"] = [-100.0] * 4, [100.0] * 4
    path.write_text(json.dumps(stats))
    return root


def _low(facts: Any) -> list[float]:
    return facts.state_stats["q01"]


def test_exact_statistics_are_those_of_the_frames(astray: Path) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("a/b", astray)
    read_columns(dataset)
    states = np.stack([dataset[row]["observation.state"].numpy() for row in range(len(dataset))])
    facts = read_dataset_facts({"root": str(astray), **EXACT})
    np.testing.assert_allclose(_low(facts), np.quantile(states, 0.01, axis=0), rtol=1e-4)
    assert _low(read_dataset_facts({"root": str(astray), "statistics": "recorded"})) == [-100.0] * 4


def test_members_of_a_mixture_have_those_of_the_mixture(astray: Path) -> None:
    members = {"one": {"repo_id": "a/b", "root": str(astray)}}
    config = {"policy": {}, "dataset": {"members": members, **EXACT}}
    (source,) = read_sources(config)
    assert min(_low(source.facts)) > -10


def test_metadata_alone_are_planned_with_their_own(astray: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(astray / "data")
    assert _low(read_dataset_facts({"root": str(astray), **EXACT})) == [-100.0] * 4
    assert "metadata alone" in caplog.text
