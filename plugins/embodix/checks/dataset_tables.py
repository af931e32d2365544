# SPDX-License-Identifier: Apache-2.0
"""The metadata of a LeRobotDataset v3.0 as tables, where every damage is a finding and none an exception.

Format: lerobot/datasets/utils.py and dataset_metadata.py of LeRobot 0.5.1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embodix.checks.catalogue import found
from embodix.checks.findings import Finding, Location, relative_to

INFO, STATS, TASKS, EPISODES = "meta/info.json", "meta/stats.json", "meta/tasks.parquet", "meta/episodes"
REPAIR = "Convert or record the data set again, or take an undamaged copy."
REWRITE_TASKS = "Write the table anew: instructions as its index, task_index 0, 1, 2, ... in the order of the rows."
VERSION = "v3."
INFO_FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "codebase_version": str,
    "features": dict,
    "total_episodes": int,
    "total_frames": int,
    "total_tasks": int,
    "data_path": str,
}
NUMBERED = ("episode_index", "length", "dataset_from_index", "dataset_to_index")
TASKS_COLUMN = "tasks"
FILE_COLUMNS = ("data/chunk_index", "data/file_index")
READ_ERRORS = (OSError, pa.ArrowException)


@dataclass
class DatasetTables:
    """A data set's metadata, as far as they could be read.

    Attributes:
        root: its folder.
        info: ``meta/info.json``.
        stats: ``meta/stats.json``: key -> name -> values; empty where there is none.
        tasks: instructions by their index.
        episodes: columns of ``meta/episodes``, one value an episode; empty where it could not be read.
        selected: numbers of the episodes that are used, None for all.
        findings: what was wrong so far.
        readable: whether data can be read by these metadata.
    """

    root: Path
    info: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, dict[str, Any]] = field(default_factory=dict)
    tasks: dict[int, str] = field(default_factory=dict)
    episodes: dict[str, list[Any]] = field(default_factory=dict)
    selected: Sequence[int] | None = None
    findings: list[Finding] = field(default_factory=list)
    readable: bool = True

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        features: dict[str, dict[str, Any]] = self.info["features"]
        return features

    @property
    def fps(self) -> float:
        return float(self.info["fps"])

    @cached_property
    def data_files(self) -> list[Path]:
        """Files of the table, in upstream's order of reading."""
        return sorted((self.root / "data").glob("*/*.parquet"))

    @property
    def cameras(self) -> dict[str, str]:
        """Camera keys with their storage, ``image`` or ``video``."""
        return {key: f["dtype"] for key, f in self.features.items() if f["dtype"] in ("image", "video")}

    @property
    def numeric_keys(self) -> list[str]:
        """Keys that are stored as numbers in the table."""
        return [key for key, f in self.features.items() if f["dtype"] not in ("image", "video", "string", "language")]

    @cached_property
    def rows_of_episodes(self) -> list[int]:
        """Positions in ``episodes`` of those that are used."""
        numbers = self.episodes.get("episode_index", [])
        if self.selected is None:
            return list(range(len(numbers)))
        place = {int(number): row for row, number in enumerate(numbers)}
        return [place[number] for number in self.selected if number in place]

    def data_file_of(self, row: int) -> Path:
        """File that holds the rows of an episode, by its position in ``episodes``."""
        chunk, file = (int(self.episodes[name][row]) for name in FILE_COLUMNS)
        return self.root / self.info["data_path"].format(chunk_index=chunk, file_index=file)

    def video_file_of(self, row: int, camera: str) -> Path:
        """Video of a camera in an episode, by its position in ``episodes``."""
        chunk, file = (int(self.episodes[f"videos/{camera}/{name}"][row]) for name in ("chunk_index", "file_index"))
        name = self.info["video_path"].format(video_key=camera, chunk_index=chunk, file_index=file)
        return self.root / str(name)


def read_tables(root: Path, selected: Sequence[int] | None = None) -> DatasetTables:
    """Read everything below ``meta/``.

    Args:
        root: folder of the data set.
        selected: numbers of the episodes that are used, None for all.
    """
    tables = DatasetTables(root, selected=selected)
    for read in (_read_info, _read_tasks, _read_episodes, _read_stats):
        problems = list(read(tables))
        tables.findings += problems
        if read is not _read_stats and any(problem.severity == "error" for problem in problems):
            tables.readable = False
            if read is _read_info:
                break
    return tables


def _read_info(tables: DatasetTables) -> Iterator[Finding]:
    info, problem = _json_object(tables.root, INFO)
    if problem is not None:
        yield problem
        return
    tables.info = info
    for name, kind in INFO_FIELDS.items():
        if not isinstance(info.get(name), kind) or isinstance(info.get(name), bool):
            got = f"{name} is {info[name]!r}" if name in info else f"has no {name}"
            yield found("info_field", INFO, got, REPAIR)
    version = str(info.get("codebase_version", ""))
    if version and not version.startswith(VERSION):
        yield found(
            "info_version",
            INFO,
            f"codebase_version is {version}, not v3.0",
            "Convert it: python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id=<user/name>, or install a "
            "LeRobot of its version.",
        )
    fps = info.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < float("inf"):
        yield found("fps_invalid", INFO, f"fps is {fps!r}", "Write the frames a second of the recording there.")
    problems = list(_feature_problems(info.get("features")))
    yield from problems
    if not problems and isinstance(info.get("features"), dict):
        videos = [key for key, storage in tables.cameras.items() if storage == "video"]
        if videos and not isinstance(info.get("video_path"), str):
            got = f"video_path is {info.get('video_path')!r}, but {', '.join(videos)} are videos"
            yield found("info_field", INFO, got, REPAIR)


def _feature_problems(features: Any) -> Iterator[Finding]:
    if not isinstance(features, dict):
        return
    for key, feature in features.items():
        shape = feature.get("shape") if isinstance(feature, dict) else None
        sound = isinstance(shape, list) and shape and all(isinstance(size, int) and size > 0 for size in shape)
        if not sound or not isinstance(feature.get("dtype"), str):
            yield found("info_field", key, f"feature {feature!r} lacks a dtype or a shape of whole numbers", REPAIR)


def _read_tasks(tables: DatasetTables) -> Iterator[Finding]:
    path = tables.root / TASKS
    if not path.is_file():
        yield found(
            "tasks_missing", TASKS, "is missing", "Record again with a `task` in every frame, or convert to v3.0."
        )
        return
    try:
        table = pq.read_table(path).to_pandas()
    except READ_ERRORS as error:
        yield found("file_unreadable", TASKS, f"can't be read: {first_line(error)}", REPAIR, Location(file=TASKS))
        return
    if "task_index" not in table:
        yield found("tasks_missing", TASKS, f"has no column task_index, but {list(table)}", REPAIR)
        return
    if not all(isinstance(instruction, str) for instruction in table.index):
        columns = ", ".join(map(str, table.columns))
        yield found("tasks_order", TASKS, f"has no instructions in its index, but the columns {columns}", REWRITE_TASKS)
        return
    numbers = [int(number) for number in table["task_index"]]
    if numbers != list(range(len(numbers))):
        yield found("tasks_order", TASKS, f"has the task indices {numbers[:6]} in this order", REWRITE_TASKS)
    tables.tasks = dict(zip(numbers, map(str, table.index), strict=True))


def _read_episodes(tables: DatasetTables) -> Iterator[Finding]:
    files = sorted((tables.root / EPISODES).glob("*/*.parquet"))
    if not files:
        yield found("episodes_missing", EPISODES, "holds no Parquet file", REPAIR)
        return
    parts = []
    for file in files:
        try:
            names = [name for name in pq.read_schema(file).names if not name.startswith("stats/")]
            parts.append(pq.read_table(file, columns=names))
        except READ_ERRORS as error:
            place = Location(file=relative_to(tables.root, file))
            yield found("file_unreadable", EPISODES, f"can't be read: {first_line(error)}", REPAIR, place)
    if len(parts) < len(files):
        return
    table = pa.concat_tables(parts, promote_options="default")
    lacking = [name for name in (*NUMBERED, TASKS_COLUMN, *FILE_COLUMNS) if name not in table.column_names]
    lacking += [name for name in _video_columns(tables) if name not in table.column_names]
    if lacking:
        yield found("episodes_missing", EPISODES, f"has no column {', '.join(lacking)}", REPAIR)
        return
    tables.episodes = table.to_pydict()
    yield from _unknown_episodes(tables)


def _video_columns(tables: DatasetTables) -> list[str]:
    videos = [key for key, storage in tables.cameras.items() if storage == "video"]
    names = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
    return [f"videos/{key}/{name}" for key in videos for name in names]


def _unknown_episodes(tables: DatasetTables) -> Iterator[Finding]:
    known = {int(number) for number in tables.episodes["episode_index"]}
    unknown = [number for number in tables.selected or () if number not in known]
    if unknown:
        yield found(
            "episode_unknown",
            "dataset.episodes",
            f"{', '.join(map(str, unknown[:5]))} {'does' if len(unknown) == 1 else 'do'} not exist; it has "
            f"{len(known)} episodes, {min(known)} to {max(known)}",
            "Name episodes that it has, or leave dataset.episodes out for all.",
        )


def _read_stats(tables: DatasetTables) -> Iterator[Finding]:
    if not (tables.root / STATS).is_file():
        return  # a rule of the policy's normalisation, which may need none
    stats, problem = _json_object(tables.root, STATS)
    if problem is not None:
        yield problem
        return
    tables.stats = {key: dict(value) for key, value in stats.items() if isinstance(value, dict)}


def _json_object(root: Path, name: str) -> tuple[dict[str, Any], Finding | None]:
    path = root / name
    if not path.is_file():
        return {}, found("info_unreadable", name, f"is missing in {root}", "Give the folder of a LeRobotDataset.")
    try:
        content = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        return {}, found("info_unreadable", name, f"is no JSON: {first_line(error)}", REPAIR, Location(file=name))
    if not isinstance(content, dict):
        return {}, found("info_unreadable", name, f"holds a {type(content).__name__}, no object", REPAIR)
    return content, None


def statistic(stats: Mapping[str, Any], name: str) -> np.ndarray | None:
    """``[D]`` values of a recorded statistic, None where there is none or it is no list of numbers."""
    try:
        return np.asarray(stats[name], dtype=np.float64).reshape(-1)
    except (KeyError, TypeError, ValueError):
        return None


def first_line(error: BaseException) -> str:
    """An error's first line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
