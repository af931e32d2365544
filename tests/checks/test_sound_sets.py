# SPDX-License-Identifier: Apache-2.0
"""Ten sound data sets of different robots pass without a remark; so does what the recorders write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embodix.checks.dataset_check import check_dataset
from embodix.checks.dataset_reading import read_dataset
from embodix.checks.run_needs import RunNeeds
from embodix.testing.damaged_datasets import QUANTILES, Damage, write_sweeping

MEAN_STD = RunNeeds("act", {"STATE": "MEAN_STD", "ACTION": "MEAN_STD"}, chunk=8)
MIN_MAX = RunNeeds("groot", {"STATE": "MIN_MAX", "ACTION": "MIN_MAX"}, bounded=True, chunk=16, language=True)

ROBOTS: dict[str, tuple[dict[str, Any], RunNeeds]] = {
    "arm with two cameras": ({}, QUANTILES),
    "arm of seven joints at 50 Hz": ({"state_dim": 7, "action_dim": 7, "fps": 50}, QUANTILES),
    "two arms with three cameras": ({"cameras": ("top", "left", "right"), "state_dim": 14, "action_dim": 14}, MIN_MAX),
    "videos": ({"video": True, "image_size": 64, "cameras": ("front",)}, QUANTILES),
    "a video file an episode": ({"video": True, "image_size": 64, "episodes_per_file": 1}, MEAN_STD),
    "many files": ({"episodes_per_file": 1, "tasks": tuple(f"put block {n} away" for n in range(6))}, QUANTILES),
    "many episodes of one task": ({"tasks": ("stack the cups",), "episodes_per_task": 6}, MEAN_STD),
    "one dimension": ({"state_dim": 1, "action_dim": 1}, QUANTILES),
    "a rate that is no whole number of milliseconds": ({"fps": 30, "episode_length": 40}, QUANTILES),
    "one camera of another size": ({"cameras": ("wrist",), "image_size": 48}, MIN_MAX),
}


@pytest.mark.parametrize("name", ROBOTS)
def test_a_sound_set_passes_without_a_remark(tmp_path: Path, name: str) -> None:
    options, needs = ROBOTS[name]
    report = check_dataset(name, read_dataset(write_sweeping(tmp_path / "set", **options)), needs)
    assert [finding.sentence for finding in report.findings] == []
    assert report.num_frames > 70
    assert {row.key for row in report.keys} == {"observation.state", "action"}


def test_a_recording_of_the_simulator_has_no_error(demonstrations: Path) -> None:
    report = check_dataset("metaworld", read_dataset(demonstrations), QUANTILES)
    assert [finding.sentence for finding in report.errors] == []


def test_what_a_data_set_holds_beside_is_no_matter(damaged: Damage) -> None:
    """Booleans, doubles, strings and further keys pass."""

    def further(columns: dict[str, list[Any]]) -> None:
        rows = len(columns["index"])
        columns["observation.gripper_open"] = [row % 2 == 0 for row in range(rows)]
        columns["observation.force"] = [[float(row), row / 2] for row in range(rows)]
        columns["note"] = ["none"] * rows

    damaged.table(further)
    features = read_dataset(damaged.root).tables.features
    beside = {
        "observation.gripper_open": {"dtype": "bool", "shape": [1], "names": None},
        "observation.force": {"dtype": "float64", "shape": [2], "names": None},
        "note": {"dtype": "string", "shape": [1], "names": None},
    }
    damaged.info(features={**features, **beside})
    report = check_dataset("set", read_dataset(damaged.root), QUANTILES)
    assert [finding.sentence for finding in report.findings] == []
    assert {row.key: row.width for row in report.keys}["observation.force"] == 2


def _sound(report: Any) -> None:
    assert [finding.sentence for finding in report.errors] == []


def test_what_trains_is_not_refused(damaged: Damage) -> None:
    """Sizes written the other way, depth, a matrix beside, fewer files than episodes, no camera, one empty task."""
    from dataclasses import replace

    import pandas

    features = dict(read_dataset(damaged.root).tables.features)
    damaged.table(lambda columns: columns.update({"jacobian": [[[1.0] * 3] * 3] * 72}))
    damaged.info(features={**features, "jacobian": {"dtype": "float32", "shape": [3, 3], "names": None}})
    _sound(check_dataset("a matrix", read_dataset(damaged.root), QUANTILES))

    front = {**features["observation.images.front"], "shape": [28, 28, 1]}
    damaged.info(features={**features, "observation.images.front": front})
    _sound(check_dataset("depth", read_dataset(damaged.root), QUANTILES))

    keypoints = {key: value for key, value in features.items() if value["dtype"] != "image"}
    keypoints["observation.environment_state"] = keypoints.pop("observation.state")
    damaged.info(features=keypoints)
    damaged.table(lambda columns: columns.update({"observation.environment_state": columns["observation.state"]}))
    _sound(check_dataset("key points", read_dataset(damaged.root), MEAN_STD))

    damaged.info(features=features, total_tasks=4)
    path = damaged.root / "meta/tasks.parquet"
    table = pandas.read_parquet(path)
    table.index = pandas.Index(["", *table.index[1:]], name=table.index.name)
    table.to_parquet(path)
    _sound(check_dataset("an empty task", read_dataset(damaged.root), QUANTILES))

    relative = replace(QUANTILES, relative=frozenset({"action"}))
    damaged.stats("action", mean=[40.0] * 4, q01=[39.0] * 4, q99=[41.0] * 4)
    _sound(check_dataset("relative actions", read_dataset(damaged.root), relative))


def test_the_files_of_the_used_episodes_are_enough(tmp_path: Path) -> None:
    root = write_sweeping(tmp_path / "set", episodes_per_file=1)
    for file in sorted((root / "data").glob("*/*.parquet"))[2:]:
        file.unlink()
    _sound(check_dataset("some files", read_dataset(root, [0, 1]), QUANTILES))


def test_a_camera_that_nobody_reads_is_no_matter(damaged: Damage) -> None:
    from dataclasses import replace

    from embodix.testing.damaged_datasets import picture, stored_image

    stored_image(lambda row: True, lambda row: picture(0))(damaged)
    reading = read_dataset(damaged.root)
    assert [finding.kind for finding in check_dataset("set", reading, QUANTILES).errors] == ["camera_black"]
    _sound(check_dataset("set", reading, replace(QUANTILES, unread=frozenset({"observation.images.front"}))))
