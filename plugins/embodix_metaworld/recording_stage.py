# SPDX-License-Identifier: Apache-2.0
"""Episodes on disk while a recording is under way: one file an episode, so that it can be interrupted.

Written beside and renamed: a file that is there is whole. Imports neither torch nor LeRobot, because the
rendering processes load it.
"""

import json
import os
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

import numpy as np

from embodix.data.recording_files import differences, write_json
from embodix_metaworld.expert import Demonstration, demonstrate
from embodix_metaworld.record_settings import RecordSettings
from embodix_metaworld.scene import MetaWorldScene

SETTINGS_FILE = "settings.json"


@dataclass(frozen=True)
class EpisodeSummary:
    """What the recorder reports of an episode without its frames."""

    task: str
    episode: int
    num_frames: int
    num_failed: int


class RecordingStage:
    """The folder of an unfinished recording, made for one set of episode settings.

    Raises:
        ValueError: the folder holds episodes of other settings.
    """

    def __init__(self, folder: Path, settings: RecordSettings) -> None:
        self.folder = folder
        self.settings = settings
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / SETTINGS_FILE
        wanted = settings.episode_settings()
        if not path.exists():
            write_json(path, wanted)
            return
        changed = differences(wanted, json.loads(path.read_text()))
        if changed:
            raise ValueError(
                f"An interrupted recording in {folder} was made with other settings ({'; '.join(changed)}). "
                "Continue it with the same settings, or delete the folder to record anew."
            )

    def path(self, task: str, episode: int) -> Path:
        """Where an episode is or will be."""
        return self.folder / "episodes" / task / f"{episode:06d}.npz"

    def record(self, task: str, episode: int) -> EpisodeSummary:
        """Record an episode, or take the one that is there."""
        path = self.path(task, episode)
        if path.exists():
            demonstration = self.load(task, episode)
        else:
            demonstration = demonstrate(_scene(task, self.settings), self.settings, episode)
            _save(path, demonstration)
        return EpisodeSummary(task, episode, len(demonstration.states), demonstration.num_failed)

    def load(self, task: str, episode: int) -> Demonstration:
        """Read a recorded episode."""
        with np.load(self.path(task, episode)) as stored:
            scalars = {"seed": int, "num_failed": int, "noise": float, "num_drift_steps": int}
            return Demonstration(
                states=stored["states"],
                actions=stored["actions"],
                images={camera: stored[f"images/{camera}"] for camera in self.settings.cameras},
                **{name: kind(stored[name]) for name, kind in scalars.items()},
            )


def _save(path: Path, demonstration: Demonstration) -> None:
    arrays = {field.name: getattr(demonstration, field.name) for field in fields(Demonstration)}
    images = arrays.pop("images")
    arrays |= {f"images/{camera}": frames for camera, frames in images.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".partial-{os.getpid()}.npz")
    try:
        np.savez(beside, **arrays)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@lru_cache(maxsize=1)
def _cached_scene(task: str, cameras: tuple[str, ...], image_size: int) -> MetaWorldScene:
    return MetaWorldScene(task, cameras, image_size)


def _scene(task: str, settings: RecordSettings) -> MetaWorldScene:
    return _cached_scene(task, settings.cameras, settings.image_size)
