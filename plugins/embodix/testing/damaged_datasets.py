# SPDX-License-Identifier: Apache-2.0
"""Sound data sets, and every way in which a copy of one is damaged to see what becomes of it."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from embodix.checks.run_needs import RunNeeds
from embodix.testing.datasets import write_dataset

QUANTILES = RunNeeds(
    policy="example",
    normalisation={"STATE": "QUANTILES", "ACTION": "QUANTILES"},
    chunk=8,
    widths={"observation.state": 32, "action": 32},
    language=True,
)


class Damage:
    """A copy of a data set that can be changed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def info(self, **changes: Any) -> None:
        """Fields of ``meta/info.json``; None takes one out."""
        path = self.root / "meta" / "info.json"
        content = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    def feature(self, key: str, **changes: Any) -> None:
        features = json.loads((self.root / "meta" / "info.json").read_text())["features"]
        self.info(features={**features, key: {**features[key], **changes}})

    def stats(self, key: str, **changes: Any) -> None:
        """Statistics of a key; None takes one out."""
        path = self.root / "meta" / "stats.json"
        content = json.loads(path.read_text())
        content[key] = {name: value for name, value in {**content[key], **changes}.items() if value is not None}
        path.write_text(json.dumps(content))

    def table(
        self, change: Callable[[dict[str, list[Any]]], None], name: str = "data/chunk-000/file-000.parquet"
    ) -> None:
        """Rewrite a table from its columns as lists; the types stay."""
        path = self.root / name
        table = pq.read_table(path)
        columns = table.to_pydict()
        change(columns)
        arrays = {
            k: pa.array(v, type=table.schema.field(k).type if k in table.schema.names else None)
            for k, v in columns.items()
        }
        pq.write_table(pa.table(arrays, schema=table.schema if list(arrays) == table.schema.names else None), path)

    def values(self, key: str, row: int, dimension: int, value: float) -> None:
        def change(columns: dict[str, list[Any]]) -> None:
            columns[key][row] = [*columns[key][row][:dimension], value, *columns[key][row][dimension + 1 :]]

        self.table(change)

    def episodes(self, change: Callable[[dict[str, list[Any]]], None]) -> None:
        self.table(change, "meta/episodes/chunk-000/file-000.parquet")

    def truncate(self, pattern: str) -> Path:
        """Cut the last third off the first file of a pattern."""
        path = sorted(self.root.glob(pattern))[0]
        content = path.read_bytes()
        path.write_bytes(content[: len(content) * 2 // 3])
        return path


def write_sweeping(root: Path, **options: Any) -> Path:
    """A data set whose episodes each sweep the same ranges, so that upstream's statistics fit it."""
    settings = {"episode_length": 24, "tasks": ("push the button", "open the drawer", "close it"), "sweeping": True}
    return write_dataset(root, **{**settings, **options})


def picture(level: int, size: int = 28) -> bytes:
    """A PNG of one grey."""
    stream = io.BytesIO()
    Image.fromarray(np.full((size, size, 3), level, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


Plant = Callable[[Damage], Any]
STATE, ACTION, FRONT = "observation.state", "action", "observation.images.front"


def column(name: str, row: int, value: Any) -> Plant:
    """Puts a value into a row of the data."""

    def change(columns: dict[str, list[Any]]) -> None:
        columns[name][row] = value

    return lambda damage: damage.table(change)


def in_episode(name: str, row: int, value: Any) -> Plant:
    """Puts a value into the table of episodes."""

    def change(columns: dict[str, list[Any]]) -> None:
        columns[name][row] = value

    return lambda damage: damage.episodes(change)


def every_row(name: str, value: Callable[[int, Any], Any]) -> Plant:
    """Replaces a column row by row."""

    def change(columns: dict[str, list[Any]]) -> None:
        columns[name] = [value(row, old) for row, old in enumerate(columns[name])]

    return lambda damage: damage.table(change)


def renamed(old: str, new: str) -> Plant:
    """Renames a feature in metadata, statistics and data."""

    def plant(damage: Damage) -> None:
        for name in ("info.json", "stats.json"):
            path = damage.root / "meta" / name
            path.write_text(path.read_text().replace(f'"{old}"', f'"{new}"'))

        def change(columns: dict[str, list[Any]]) -> None:
            columns[new] = columns.pop(old)

        damage.table(change)

    return plant


def stored_image(rows: Callable[[int], bool], content: Callable[[int], bytes]) -> Plant:
    def replace(row: int, old: Any) -> Any:
        return {"bytes": content(row), "path": None} if rows(row) else old

    return every_row(FRONT, replace)


def _write(name: str, text: str) -> Plant:
    return lambda damage: (damage.root / name).write_text(text)


def _remove(pattern: str) -> Plant:
    def plant(damage: Damage) -> None:
        for path in sorted(damage.root.glob(pattern)):
            path.unlink()

    return plant


def _together(*plants: Plant) -> Plant:
    def plant(damage: Damage) -> None:
        for one in plants:
            one(damage)

    return plant


def _without_column(name: str) -> Plant:
    def change(columns: dict[str, list[Any]]) -> None:
        del columns[name]

    return lambda damage: damage.table(change)


def _as_text(key: str) -> Plant:
    return lambda damage: damage.feature(key, dtype="string")


def _cut(pattern: str) -> Plant:
    return lambda damage: damage.truncate(pattern)


def _task(row: int, text: str) -> Plant:
    def plant(damage: Damage) -> None:
        import pandas

        path = damage.root / "meta" / "tasks.parquet"
        table = pandas.read_parquet(path)
        names = list(table.index)
        names[row] = text
        table.index = pandas.Index(names, name=table.index.name)
        table.to_parquet(path)

    return plant


def _rewritten_tasks(change: Callable[[Any], Any]) -> Plant:
    def plant(damage: Damage) -> None:
        import pandas

        path = damage.root / "meta" / "tasks.parquet"
        change(pandas.read_parquet(path)).to_parquet(path)

    return plant


_reordered_tasks = _rewritten_tasks(lambda table: table.iloc[::-1])
_plain_tasks = _rewritten_tasks(lambda table: table.rename_axis("task").reset_index())


def _numbered_from_five(damage: Damage) -> None:
    def change(columns: dict[str, list[Any]]) -> None:
        columns["episode_index"] = [number + 5 for number in columns["episode_index"]]

    damage.table(change)
    damage.episodes(change)


def needs(**changes: Any) -> RunNeeds:
    return dataclasses.replace(QUANTILES, **changes)


# kind, what is planted, what the finding's place or figure has to say, needs that differ
PLANTED: list[tuple[str, Plant, str, RunNeeds]] = [
    ("info_unreadable", _write("meta/info.json", '{"fps": 10,'), "no JSON", QUANTILES),
    ("info_unreadable", _remove("meta/info.json"), "missing", QUANTILES),
    ("info_unreadable", _write("meta/info.json", "[]"), "list", QUANTILES),
    ("info_unreadable", _write("meta/stats.json", "{nan"), "no JSON", QUANTILES),
    ("info_field", lambda d: d.info(features=None), "features", QUANTILES),
    ("info_field", lambda d: d.info(total_frames="many"), "'many'", QUANTILES),
    ("info_field", lambda d: d.feature(STATE, shape="4"), "whole numbers", QUANTILES),
    ("info_version", lambda d: d.info(codebase_version="v2.1"), "v2.1", QUANTILES),
    ("fps_invalid", lambda d: d.info(fps=0), "0", QUANTILES),
    ("fps_invalid", lambda d: d.info(fps="10 Hz"), "10 Hz", QUANTILES),
    ("tasks_missing", _remove("meta/tasks.parquet"), "missing", QUANTILES),
    ("episodes_missing", _remove("meta/episodes/*/*.parquet"), "no Parquet", QUANTILES),
    ("file_unreadable", _cut("data/*/*.parquet"), "episode 0", QUANTILES),
    ("file_unreadable", _cut("meta/tasks.parquet"), "tasks.parquet", QUANTILES),
    ("file_unreadable", _cut("meta/episodes/*/*.parquet"), "meta/episodes", QUANTILES),
    ("file_missing", in_episode("data/file_index", 1, 7), "file-007", QUANTILES),
    ("totals_differ", lambda d: d.info(total_frames=80), "72 rows", QUANTILES),
    ("totals_differ", lambda d: d.info(total_tasks=9), "3 tasks", QUANTILES),
    ("length_differs", in_episode("length", 1, 30), "episode 1", QUANTILES),
    ("bounds_differ", in_episode("dataset_to_index", 1, 60), "episode 1", QUANTILES),
    ("bounds_differ", in_episode("dataset_from_index", 2, 40), "episode 2", QUANTILES),
    ("episode_split", column("episode_index", 30, 0), "episode 0", QUANTILES),
    ("index_gap", column("index", 40, 4), "row 40", QUANTILES),
    ("frame_index_gap", column("frame_index", 40, 4), "episode 1", QUANTILES),
    ("task_unknown", column("task_index", 30, 5), "episode 1, frame 6", QUANTILES),
    ("timestamps_differ", lambda d: d.info(fps=20), "the rows 10", QUANTILES),
    ("timestamps_differ", column("timestamp", 31, 9.5), "episode 1, frame 7", QUANTILES),
    ("shape_differs", lambda d: d.feature(STATE, shape=[6]), "have 4", QUANTILES),
    ("column_missing", _without_column(ACTION), ACTION, QUANTILES),
    ("dtype_unusable", lambda d: d.feature(ACTION, dtype="string"), "string", QUANTILES),
    ("key_missing", renamed(STATE, "state"), "rename_map={state: observation.state}", QUANTILES),
    ("key_missing", renamed(ACTION, "actions"), "dataset.join={action: [actions]}", QUANTILES),
    (
        "rename_unknown",
        lambda d: None,
        "Did you mean observation.images.front",
        needs(rename_map={"observation.images.frnt": FRONT}),
    ),
    (
        "camera_unknown",
        lambda d: None,
        "rename_map={observation.images.front: observation.images.base}",
        needs(cameras=("observation.images.base", "observation.images.wrist")),
    ),
    (
        "camera_missing",
        _together(*(_as_text(f"observation.images.{camera}") for camera in ("front", "wrist"))),
        "no image",
        QUANTILES,
    ),
    ("too_wide", lambda d: None, "takes 3", needs(widths={ACTION: 3})),
    ("statistics_missing", _remove("meta/stats.json"), "dataset.statistics=exact", QUANTILES),
    (
        "statistics_missing",
        _write("meta/stats.json", "{}"),
        "use_imagenet_stats",
        needs(normalisation={"VISUAL": "MEAN_STD"}, imagenet=False),
    ),
    ("statistics_name", lambda d: d.stats(STATE, q99=None), "lacks q99", QUANTILES),
    ("statistics_name", lambda d: d.stats(ACTION, max=None), "lacks max", needs(normalisation={"ACTION": "MIN_MAX"})),
    ("statistics_shape", lambda d: d.stats(STATE, q01=[0.0], q99=[1.0]), "the data 4", QUANTILES),
    ("statistics_not_finite", lambda d: d.stats(ACTION, q01=[0, float("nan"), 0, 0]), "dimension 1", QUANTILES),
    ("statistics_inverted", lambda d: d.stats(ACTION, q01=[9] * 4, q99=[-9] * 4), "dimension 0", QUANTILES),
    ("statistics_of_other_data", lambda d: d.stats(STATE, mean=[50.0] * 4), "recorded mean 50", QUANTILES),
    ("quantiles_averaged", lambda d: d.stats(ACTION, q01=[-1, -1, -1, -1], q99=[1, 1, 1, 1]), "2 % should", QUANTILES),
    ("normalised_large", lambda d: d.stats(STATE, q01=[0.5] * 4, q99=[0.5] * 4), "dimension", QUANTILES),
    ("normalised_large", lambda d: d.stats(STATE, q01=[0.5] * 4, q99=[0.5000001] * 4), "dimension", QUANTILES),
    (
        "normalised_large",
        _together(lambda d: d.values(ACTION, 5, 2, 3e6), lambda d: d.stats(ACTION, mean=None, std=None)),
        "dimension 2",
        needs(normalisation={"ACTION": "QUANTILES"}),
    ),
    ("not_finite", lambda d: d.values(STATE, 30, 2, float("nan")), "episode 1, frame 6, dimension 2", QUANTILES),
    ("not_finite", lambda d: d.values(ACTION, 70, 0, float("inf")), "episode 2, frame 22, dimension 0", QUANTILES),
    ("null_values", column(STATE, 3, None), "missing", QUANTILES),
    ("null_values", column("task_index", 3, None), "task_index: has rows without a value", QUANTILES),
    ("null_values", column("frame_index", 3, None), "frame_index: has rows without a value", QUANTILES),
    ("episode_short", lambda d: None, "shorter than a chunk of 25", needs(chunk=25)),
    ("no_motion", every_row(STATE, lambda row, old: [0.5] * 4 if row < 24 else old), "1 of 3 episodes: 0", QUANTILES),
    ("action_constant", every_row(ACTION, lambda row, old: [row // 24] * 4), "every episode", QUANTILES),
    ("instruction_empty", _together(_task(1, "  "), in_episode("tasks", 1, ["  "])), "1 of 3 episodes", QUANTILES),
    ("tasks_order", _reordered_tasks, "[2, 1, 0]", QUANTILES),
    ("tasks_order", _plain_tasks, "no instructions in its index", QUANTILES),
    ("episode_numbers", _numbered_from_five, "episode 5 in row 0", QUANTILES),
    ("info_field", lambda d: d.feature(STATE, shape=[]), "whole numbers", QUANTILES),
    (
        "instruction_long",
        lambda d: None,
        "policy reads 2",
        needs(prompt_length=lambda task: len(task.split()), max_prompt=2),
    ),
    (
        "image_unreadable",
        stored_image(lambda row: row == 35, lambda row: b"no picture"),
        "episode 1, frame 11",
        QUANTILES,
    ),
    ("image_shape", stored_image(lambda row: True, lambda row: picture(90 + row, size=32)), "32x32 pixels", QUANTILES),
    (
        "image_shape",
        stored_image(lambda row: row < 24, lambda row: picture(90 + row, size=32)),
        "28x28 and 32x32",
        QUANTILES,
    ),
    ("camera_black", stored_image(lambda row: True, lambda row: picture(2)), "black in 3 of the 3", QUANTILES),
    ("camera_black", stored_image(lambda row: row >= 48, lambda row: picture(0)), "episode 2", QUANTILES),
    ("camera_frozen", stored_image(lambda row: True, lambda row: picture(90)), "frozen in 3 of the 3", QUANTILES),
]
IN_VIDEO: list[tuple[str, Plant, str]] = [
    ("video_unreadable", _write(f"videos/{FRONT}/chunk-000/file-000.mp4", "no video"), "file-000.mp4"),
    ("video_short", _cut("videos/*/*/*.mp4"), "it has 47 frames"),
    ("file_missing", _remove("videos/*/*/file-000.mp4"), "episode 0"),
    ("video_short", in_episode(f"videos/{FRONT}/from_timestamp", 2, 30.0), "episode 2, frame 0"),
    ("timestamps_differ", column("timestamp", 31, 9.5), "episode 1, frame 7"),
]
