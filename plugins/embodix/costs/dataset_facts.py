# SPDX-License-Identifier: Apache-2.0
"""What a LeRobotDataset's metadata say about the cost of training on it: episodes, tasks, cameras, state range.

Reads ``meta/`` only, plus the ``camera_is_pad`` column where a data set has one, and the numeric columns for exact
statistics; decodes no image.
Format: LeRobotDataset v3.0 (lerobot/datasets/utils.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodix.checks.dataset_check import local_folder, statistics_choice
from embodix.checks.dataset_tables import DatasetTables
from embodix.checks.exact_statistics import exact_statistics_of
from embodix.checks.guard import require_readable_metadata
from embodix.data.joined_columns import JOIN, Join, complete_join, decode_join, joined_features, joined_stats

CAMERA_IS_PAD = "camera_is_pad"


@dataclass(frozen=True)
class EpisodeFacts:
    """One episode: its length in frames, its task, and how many cameras are absent in it."""

    length: int
    task: str
    num_absent_cameras: int = 0


@dataclass(frozen=True)
class DatasetFacts:
    """A data set as training will draw from it.

    Attributes:
        name: repo id.
        episodes: those that are used.
        cameras: image keys, with the shape of an image, channels first.
        widths: dimensions of state and action, where the data set has them.
        state_stats: statistics of ``observation.state`` by name (``q01``, ``mean``, ...), one value a dimension.
    """

    name: str
    episodes: list[EpisodeFacts]
    cameras: dict[str, list[int]]
    widths: dict[str, int]
    state_stats: dict[str, list[float]]

    @property
    def num_frames(self) -> int:
        return sum(episode.length for episode in self.episodes)

    def frames_by_task(self) -> dict[str, int]:
        """Frames of each task, in the order of first appearance."""
        frames: dict[str, int] = {}
        for episode in self.episodes:
            frames[episode.task] = frames.get(episode.task, 0) + episode.length
        return frames


def read_dataset_facts(dataset: Mapping[str, Any]) -> DatasetFacts:
    """Read the metadata of the data set that a train config names.

    Args:
        dataset: ``dataset`` node; ``root``, ``repo_id``, ``episodes``, ``join`` and ``statistics`` are used.

    Raises:
        ValueError: no data set there, no task strings, episodes that it does not have, or for exact statistics, frames
            that can't be read.
    """
    root = local_folder(dataset)
    if root is None or not (root / "meta" / "info.json").is_file():
        raise ValueError(
            f"A plan reads the metadata of a LeRobotDataset; {root or 'this machine'} has no meta/info.json. Record "
            "one with `lerobot data <source>`, set dataset.root, or fetch the metadata alone: "
            f"hf download {dataset.get('repo_id')} --repo-type dataset --include 'meta/*' --local-dir <dataset.root>."
        )
    tables = require_readable_metadata(root, dataset.get("episodes"))
    join = complete_join(decode_join(f"dataset.{JOIN}", dataset.get(JOIN)), tables.features)
    features, stats = joined_features(join, tables.features), joined_stats(join, tables.stats)
    if statistics_choice(dataset) == "exact":
        stats = _exact_where_frames_are(root, dataset.get("episodes"), join, stats)
    state_stats = stats.get("observation.state", {})
    return DatasetFacts(
        name=str(dataset.get("repo_id") or root.name),
        episodes=_read_episodes(tables, CAMERA_IS_PAD in features),
        cameras={key: _channels_first(f["shape"]) for key, f in features.items() if f["dtype"] in ("image", "video")},
        widths={key: features[key]["shape"][0] for key in ("observation.state", "action") if key in features},
        state_stats={
            name: np.asarray(values, dtype=float).reshape(-1).tolist() for name, values in state_stats.items()
        },
    )


def _exact_where_frames_are(
    root: Path, episodes: Sequence[int] | None, join: Join, recorded: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    if any((root / "data").glob("**/*.parquet")):
        return exact_statistics_of(root, episodes, join, recorded)
    logging.warning(
        f"{root} has metadata alone: prompts are planned with its recorded statistics, while dataset.statistics=exact "
        "trains with those of its frames. Fetch data/ for exact counts."
    )
    return recorded


def padded_action_share(lengths: Sequence[int], chunk_size: int) -> float:
    """Share of action steps that lie after the end of their episode, over all frames.

    A frame that is ``r`` steps before the end has ``chunk_size - r`` such steps; where every episode is longer than a
    chunk this is ``(chunk_size - 1) / (2 * mean length)``.
    """
    padded = 0
    for length in lengths:
        ends = min(length, chunk_size)
        padded += ends * chunk_size - ends * (ends + 1) // 2
    return padded / (chunk_size * sum(lengths))


def _read_episodes(tables: DatasetTables, has_absent_cameras: bool) -> list[EpisodeFacts]:
    absent = _absent_cameras(tables.root) if has_absent_cameras else {}
    columns = tables.episodes
    episodes = []
    for row in tables.rows_of_episodes:
        number = int(columns["episode_index"][row])
        task = str(columns["tasks"][row][0])
        episodes.append(EpisodeFacts(int(columns["length"][row]), task, absent.get(number, 0)))
    return episodes


def _absent_cameras(root: Path) -> dict[int, int]:
    """Absent cameras of each episode, by the first of its frames."""
    import pandas

    files = sorted((root / "data").glob("**/*.parquet"))
    columns = ["episode_index", CAMERA_IS_PAD]
    table = pandas.concat([pandas.read_parquet(file, columns=columns) for file in files])
    first = table.drop_duplicates("episode_index")
    return {int(row.episode_index): int(sum(row.camera_is_pad)) for row in first.itertuples()}


def _channels_first(shape: Sequence[int]) -> list[int]:
    return list(shape) if shape[0] in (1, 3) else [shape[2], *shape[:2]]
