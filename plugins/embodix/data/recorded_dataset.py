# SPDX-License-Identifier: Apache-2.0
"""A recorded LeRobotDataset on disk: its manifest and tokenizer, when it may be reused, and how it is finished.

A data set is written beside its place and renamed when complete. A finished one is reused; one that was recorded with
other settings is never touched.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodix.data.recording_files import differences, write_json
from embodix.data.tokenizer import build_tokenizer

MANIFEST_FILE = "embodix_recording.json"
TOKENIZER_FOLDER = "tokenizer"


@dataclass(frozen=True)
class RecordedDataset:
    """A finished recording: its folder, its tokenizer's folder, its counts, and whether it was there already."""

    root: Path
    tokenizer: Path
    num_episodes: int
    num_frames: int
    num_failed: int
    reused: bool

    @property
    def sentence(self) -> str:
        """What there is, for people."""
        return (
            f"{'Reused' if self.reused else 'Recorded'} {self.root}: {self.num_episodes} episodes, "
            f"{self.num_frames} frames ({self.num_failed} failed attempts were drawn again)"
        )


def image_key(camera: str) -> str:
    """The data set feature of a camera."""
    return f"observation.images.{camera}"


def read_manifest(root: str | Path) -> dict[str, Any]:
    """The settings and per-episode facts of a recorded data set.

    Raises:
        ValueError: the folder holds no finished recording.
    """
    path = Path(root) / MANIFEST_FILE
    if not path.exists():
        raise ValueError(
            f"{root} is not a finished recording: it has no {MANIFEST_FILE}. Record one with `lerobot data`, "
            "or name another folder."
        )
    return json.loads(path.read_text())


def episodes_of_task(root: str | Path, task: str) -> list[int]:
    """Episode indices of a task in a recorded data set (for LeRobot's `dataset.episodes`).

    Raises:
        ValueError: no recording, or the task is not in it.
    """
    episodes = read_manifest(root)["episodes"]
    indices = [episode["episode_index"] for episode in episodes if episode["task"] == task]
    if not indices:
        raise ValueError(f"{root} has no task {task!r}. Its tasks: {sorted({e['task'] for e in episodes})}")
    return indices


def require_place(root: Path) -> None:
    """Check that a data set can be written there, before anything is recorded.

    Raises:
        ValueError: a file, below a file, or below a folder that can't be written.
    """
    if root.exists() and not root.is_dir():
        raise ValueError(f"root={root} is a file; name the folder that the data set is to be.")
    parent = next(folder for folder in root.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise ValueError(f"root={root} lies below {parent}, which is a file; name another folder.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"root={root} can't be made: {parent} can't be written by you; name another folder.")


def reuse_dataset(root: Path, settings: dict[str, Any]) -> RecordedDataset | None:
    """The finished data set in a folder, None where the folder is missing or empty.

    Raises:
        ValueError: the folder holds something else, or a data set of other settings, or can't be made.
    """
    require_place(root)
    if not root.exists() or not any(root.iterdir()):
        return None
    manifest = read_manifest(root)
    changed = differences(settings, manifest["settings"])
    if changed:
        raise ValueError(
            f"{root} was recorded with other settings ({'; '.join(changed)}). "
            "Record into another root, use the settings it was made with, or delete it."
        )
    return _describe(root, manifest, reused=True)


def _describe(root: Path, manifest: dict[str, Any], reused: bool) -> RecordedDataset:
    episodes = manifest["episodes"]
    return RecordedDataset(
        root=root,
        tokenizer=root / TOKENIZER_FOLDER,
        num_episodes=len(episodes),
        num_frames=sum(episode["num_frames"] for episode in episodes),
        num_failed=sum(episode["num_failed"] for episode in episodes),
        reused=reused,
    )


def finish_dataset(unfinished: Path, root: Path, manifest: dict[str, Any], vocab_size: int) -> RecordedDataset:
    """Add the tokenizer of its instructions and the manifest to a written data set, and move it to its place."""
    instructions = sorted({episode["instruction"] for episode in manifest["episodes"]})
    build_tokenizer(instructions, unfinished / TOKENIZER_FOLDER, vocab_size)
    write_json(unfinished / MANIFEST_FILE, manifest)
    root.parent.mkdir(parents=True, exist_ok=True)
    unfinished.rename(root)
    return _describe(root, manifest, reused=False)


@contextmanager
def no_bar_per_episode() -> Iterator[None]:
    """Without the bar that Hugging Face `datasets` draws for every episode it embeds images of."""
    import datasets

    were_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            datasets.enable_progress_bars()


def write_exact_quantiles(folder: Path, frames: Mapping[str, np.ndarray]) -> None:
    """Replace the quantiles of features, (num_frames, dim) each, by those over all frames.

    LeRobot averages the quantiles of episodes (datasets/compute_stats.py, aggregate_feature_stats). Where a
    dimension is constant in each episode but differs between tasks, as the gripper effort is here, both
    averages are one number up to rounding, and normalising divides by that rounding error.
    """
    from lerobot.datasets.compute_stats import DEFAULT_QUANTILES
    from lerobot.datasets.io_utils import load_stats, write_stats

    stats = load_stats(folder)
    for key, values in frames.items():
        for quantile in DEFAULT_QUANTILES:
            stats[key][f"q{int(quantile * 100):02d}"] = np.quantile(values.astype(np.float64), quantile, axis=0)
    write_stats(stats, folder)
