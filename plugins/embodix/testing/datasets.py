# SPDX-License-Identifier: Apache-2.0
"""Small LeRobotDatasets of made-up robots, written by upstream's own writer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def write_dataset(
    root: Path,
    *,
    cameras: Sequence[str] = ("front", "wrist"),
    state_dim: int = 4,
    action_dim: int = 4,
    tasks: Sequence[str] = ("push the button", "open the drawer slowly and wait until it is open"),
    episode_length: int = 12,
    episodes_per_task: int = 1,
    image_size: int = 28,
    fps: int = 10,
    video: bool = False,
    episodes_per_file: int | None = None,
    seed: int = 0,
    sweeping: bool = False,
) -> Path:
    """Write episodes of moving blobs with smooth states and actions, and return ``root``.

    Args:
        sweeping: every episode goes through the same range of states and actions, so that statistics of episodes
            are those of all.
        video: store cameras as videos (H.264) instead of images.
        episodes_per_file: episodes in one data file and one video file a camera; None for upstream's size limits.
    """
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features: dict[str, dict[str, Any]] = {
        f"observation.images.{name}": {
            "dtype": "video" if video else "image",
            "shape": (image_size, image_size, 3),
            "names": ["height", "width", "channels"],
        }
        for name in cameras
    }
    features["observation.state"] = {"dtype": "float32", "shape": (state_dim,), "names": None}
    features["action"] = {"dtype": "float32", "shape": (action_dim,), "names": None}
    codec = {"vcodec": "h264"} if video else {}
    dataset = LeRobotDataset.create(f"embodix/{root.name}", fps, features, root=root, use_videos=video, **codec)
    rng = np.random.default_rng(seed)
    for episode, task in enumerate(task for task in tasks for _ in range(episodes_per_task)):
        if episodes_per_file is not None:
            _limit_files(dataset, megabytes=1e-9 if episode % episodes_per_file == 0 else 10**6)
        for frame in _frames(rng, cameras, state_dim, action_dim, episode_length, image_size, sweeping):
            dataset.add_frame({**frame, "task": task})
        dataset.save_episode()
    dataset.finalize()
    return root


def _limit_files(dataset: Any, megabytes: float) -> None:
    """Upstream begins another file once an episode would bring the current one above this size."""
    dataset.meta.info |= {"data_files_size_in_mb": megabytes, "video_files_size_in_mb": megabytes}


def _frames(
    rng: np.random.Generator,
    cameras: Sequence[str],
    state_dim: int,
    action_dim: int,
    length: int,
    image_size: int,
    sweeping: bool,
) -> Iterator[dict[str, Any]]:
    """Frames of one episode: every camera sees its own blob pass over its own noise."""
    noise = rng.integers(0, 120, (len(cameras), image_size, image_size, 3), dtype=np.uint8)
    start, velocity = rng.random((len(cameras), 2)), rng.normal(0, 0.05, (len(cameras), 2))
    phases = rng.random(state_dim + action_dim) * 6
    pace = 2 * np.pi / length if sweeping else 1 / 5
    rows, columns = np.mgrid[0:image_size, 0:image_size] / image_size
    for step in range(length):
        values = np.sin(phases + step * pace).astype(np.float32) * np.arange(1, state_dim + action_dim + 1)
        frame: dict[str, Any] = {
            "observation.state": values[:state_dim].astype(np.float32),
            "action": values[state_dim:].astype(np.float32),
        }
        for number, name in enumerate(cameras):
            row, column = (start[number] + step * velocity[number]) % 1
            blob = np.exp(-((rows - row) ** 2 + (columns - column) ** 2) / 0.02)[..., None]
            frame[f"observation.images.{name}"] = (noise[number] + 130 * blob).astype(np.uint8)
        yield frame
