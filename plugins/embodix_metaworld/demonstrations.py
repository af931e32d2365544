# SPDX-License-Identifier: Apache-2.0
"""Demonstrations by MetaWorld's scripted experts: their settings, one episode, and episodes on disk meanwhile.

An expert alone visits one thin path, and a policy that errs off it has seen nothing. So the executed
action is disturbed while the recorded one is what the expert wanted (DART, https://arxiv.org/abs/1703.09327),
some episodes start with a drift to another place and are shoved off their path later.

While a recording is under way there is one file an episode, so that it can be interrupted. Written beside and renamed:
a file that is there is whole. Imports neither torch nor LeRobot, because the rendering processes load it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from embodix.data.recording_files import differences, write_json
from embodix_metaworld.simulator import ACTION_DIM, MetaWorldScene, robot_state, scripted_expert

MAX_ATTEMPTS = 50
SETTINGS_FILE = "settings.json"
# Counts the changes of views, antialiasing and resets in embodix_metaworld.simulator: frames of another do not match.
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
            raise ValueError(
                f"`episodes` names tasks that are not in `tasks`: {strangers}; `tasks`: {self.tasks}. Leave it out "
                "(~episodes), or name those tasks too."
            )
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
        for name in ("seed", "max_drift_steps", "hold_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must be at least 0, got {getattr(self, name)}.")
        if not self.noise_levels or min(self.noise_levels) < 0:
            raise ValueError(f"`noise_levels` must be one or more numbers from 0 on, got {list(self.noise_levels)}.")

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


@dataclass(frozen=True)
class Demonstration:
    """A successful episode of T frames.

    `states` (T, num_state) and `actions` (T, 4) float32; `images` by camera, uint8 (T, H, W, 3); `seed` is the scene's;
    `num_failed` counts the attempts thrown away before; `noise` is the standard deviation of the disturbance
    and `num_drift_steps` the length of the drift before the first frame.
    """

    states: np.ndarray
    actions: np.ndarray
    images: dict[str, np.ndarray]
    seed: int
    num_failed: int
    noise: float
    num_drift_steps: int


def demonstrate(scene: MetaWorldScene, settings: RecordSettings, episode: int) -> Demonstration:
    """Record one successful episode; a failed attempt is drawn again with the next seed.

    The result depends on the settings' seed, the task and `episode` alone.

    Raises:
        RuntimeError: the expert failed `MAX_ATTEMPTS` times.
    """
    for attempt in range(MAX_ATTEMPTS):
        rng = np.random.default_rng([settings.seed, *scene.task.encode(), episode, attempt])
        demonstration = _attempt(scene, settings, rng, attempt)
        if demonstration is not None:
            return demonstration
    raise RuntimeError(
        f"The expert of {scene.task} failed {MAX_ATTEMPTS} times in a row within {settings.max_episode_steps} steps. "
        "Give it more steps (max_episode_steps) or less noise (noise_levels)."
    )


def _attempt(
    scene: MetaWorldScene, settings: RecordSettings, rng: np.random.Generator, num_failed: int
) -> Demonstration | None:
    expert = scripted_expert(scene.task)
    seed = int(rng.integers(2**31))
    noise = float(rng.choice(settings.noise_levels))
    drifts = rng.random() < settings.drift_fraction
    num_drift_steps = int(rng.integers(5, settings.max_drift_steps + 1)) if drifts else 0
    observation = _drift(scene, scene.reset(seed), num_drift_steps, rng)
    shoves = _Shoves(settings.shove_probability if drifts else 0.0, settings.max_shove_steps, rng)
    states, actions, frames = [], [], []
    num_hold_steps_left = None
    for _ in range(settings.max_episode_steps):
        action = np.clip(expert.get_action(observation), -1.0, 1.0).astype(np.float32)
        states.append(robot_state(observation, settings.state))
        actions.append(action)
        frames.append(scene.render())
        disturbed = action.copy()
        disturbed[:3] += noise * rng.standard_normal(3, dtype=np.float32)
        observation, _, success = scene.step(np.clip(shoves.apply(disturbed), -1.0, 1.0))
        if success and num_hold_steps_left is None:
            num_hold_steps_left = settings.hold_steps
        if num_hold_steps_left is not None:
            if num_hold_steps_left == 0:
                break
            num_hold_steps_left -= 1
    if num_hold_steps_left is None:
        return None
    images = {camera: np.stack([frame[camera] for frame in frames]) for camera in scene.cameras}
    return Demonstration(np.stack(states), np.stack(actions), images, seed, num_failed, noise, num_drift_steps)


class _Shoves:
    """Now and then, some steps in a random direction instead of the action; the gripper's effort stays."""

    def __init__(self, probability: float, max_steps: int, rng: np.random.Generator) -> None:
        self._probability, self._max_steps, self._rng = probability, max_steps, rng
        self._num_steps_left = 0
        self._direction: np.ndarray = np.zeros(3, np.float32)

    def apply(self, action: np.ndarray) -> np.ndarray:
        """The action to execute in this step (4,)."""
        if self._probability == 0:  # draws nothing: recordings without shoves stay what they were
            return action
        if self._num_steps_left == 0 and self._rng.random() < self._probability:
            self._num_steps_left = int(self._rng.integers(1, self._max_steps + 1))
            self._direction = self._rng.uniform(-1.0, 1.0, 3).astype(np.float32)
        if self._num_steps_left == 0:
            return action
        self._num_steps_left -= 1
        return np.concatenate([self._direction, action[3:]])


def _drift(scene: MetaWorldScene, observation: np.ndarray, num_steps: int, rng: np.random.Generator) -> np.ndarray:
    direction = rng.uniform(-1.0, 1.0, ACTION_DIM).astype(np.float32)
    direction[3] = -1.0
    for _ in range(num_steps):
        observation, _, _ = scene.step(direction)
    return observation


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
