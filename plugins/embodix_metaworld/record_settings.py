# SPDX-License-Identifier: Apache-2.0
"""Settings of recordings. Imports no torch."""

from dataclasses import dataclass, field
from typing import Any

# Counts the changes of views, antialiasing and resets in embodix_metaworld.scene: frames of another do not match.
RENDERING = 4
_EPISODE_SETTINGS = (
    "cameras",
    "state",
    "image_size",
    "seed",
    "noise_levels",
    "drift_fraction",
    "max_drift_steps",
    "shove_probability",
    "max_shove_steps",
    "hold_steps",
    "max_episode_steps",
)
_DATASET_SETTINGS = ("instructions", "storage", "video_codec", "repo_id", "missing_camera_fraction", "vocab_size")


@dataclass(frozen=True)
class RecordSettings:
    """What to record with `embodix_metaworld.recorder.record_metaworld`.

    `root` is the folder of the data set, `tasks` are MetaWorld names, each with `episodes_per_task` episodes or
    what `episodes` says for it. `cameras` names the rendered views, `image_size` their height and width in pixels.
    `state` names what of the robot's own state is recorded.
    `storage` is how images are stored: "image" (lossless) or "video" (`video_codec`, lossy, smaller).
    `missing_camera_fraction` is the share of episodes, 0 to 1, recorded with one camera absent.
    `noise_levels` are standard deviations of the disturbance, one drawn an episode; `drift_fraction` is the share
    of episodes that start with a drift of up to `max_drift_steps` steps. In those, a shove begins at a step with
    `shove_probability`: for up to `max_shove_steps` steps the hand moves in a random direction, while the recorded
    action stays what the expert wanted. `hold_steps` follow the first success.
    """

    root: str
    tasks: tuple[str, ...]
    episodes_per_task: int = 6
    episodes: dict[str, int] = field(default_factory=dict)
    instructions: dict[str, str] = field(default_factory=dict)
    cameras: tuple[str, ...] = ("front", "gripper")
    state: tuple[str, ...] = ("hand_x", "hand_y", "hand_z", "gripper_opening")
    image_size: int = 56
    storage: str = "image"
    video_codec: str = "libsvtav1"
    seed: int = 0
    repo_id: str = "embodix/metaworld"
    missing_camera_fraction: float = 0.0
    noise_levels: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6)
    drift_fraction: float = 0.5
    max_drift_steps: int = 20
    shove_probability: float = 0.0
    max_shove_steps: int = 15
    hold_steps: int = 6
    max_episode_steps: int = 200
    vocab_size: int = 1024
    num_workers: int = 2
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("tasks", "cameras", "state", "noise_levels"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.tasks or len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"`tasks` must be different MetaWorld task names, got {list(self.tasks)}.")
        if self.storage not in ("image", "video"):
            raise ValueError(f"`storage` must be 'image' or 'video', got {self.storage!r}.")
        strangers = sorted(set(self.episodes) - set(self.tasks))
        if strangers:
            raise ValueError(f"`episodes` names tasks that are not in `tasks`: {strangers}; `tasks`: {self.tasks}.")
        for task in self.tasks:
            if self.num_episodes(task) < 1:
                raise ValueError(f"Every task needs at least one episode, got {self.num_episodes(task)} for {task}.")
        for name in ("missing_camera_fraction", "drift_fraction", "shove_probability"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"`{name}` must lie between 0 and 1, got {getattr(self, name)}.")
        if self.missing_camera_fraction > 0 and len(self.cameras) < 2:
            raise ValueError("`missing_camera_fraction` needs at least two cameras: one has to stay.")
        for name in ("image_size", "max_shove_steps", "max_episode_steps", "num_workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")

    def num_episodes(self, task: str) -> int:
        """How many episodes of a task are recorded."""
        return self.episodes.get(task, self.episodes_per_task)

    def episode_settings(self) -> dict[str, Any]:
        """What decides the content of episodes, as JSON types: equal settings give equal episodes."""
        return {"rendering": RENDERING, **{name: _plain(getattr(self, name)) for name in _EPISODE_SETTINGS}}

    def dataset_settings(self) -> dict[str, Any]:
        """What decides the content of the finished data set, as JSON types."""
        return {
            "episodes": {task: self.num_episodes(task) for task in self.tasks},
            **{name: _plain(getattr(self, name)) for name in _DATASET_SETTINGS},
            **self.episode_settings(),
        }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
