# SPDX-License-Identifier: Apache-2.0
"""Record MetaWorld demonstrations into a LeRobotDataset v3, with instructions and a tokenizer beside them.

Episodes are rendered by worker processes into a staging folder, then written with LeRobot's own writer into
a folder beside the final one, which is renamed when complete. An interrupted recording continues; a finished
one is reused; a data set recorded with other settings is never touched.
"""

import json
import multiprocessing
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from embodix.data.instructions import instruction_for
from embodix.data.metaworld_expert import Demonstration
from embodix.data.metaworld_scene import (
    ACTION_DIM,
    ACTION_NAMES,
    FPS,
    check_cameras,
    check_state,
    task_names,
)
from embodix.data.recording_stage import EpisodeSummary, RecordingStage, differences, write_json
from embodix.data.rendering import select_gl_backend
from embodix.data.tokenizer import build_tokenizer
from embodix.schema.data import RecordSettings

if TYPE_CHECKING:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

MANIFEST_FILE = "embodix_recording.json"
TOKENIZER_FOLDER = "tokenizer"
CAMERA_IS_PAD = "camera_is_pad"


@dataclass(frozen=True)
class RecordedDataset:
    """A finished recording: its folder, its tokenizer's folder, its counts, and whether it was there already."""

    root: Path
    tokenizer: Path
    num_episodes: int
    num_frames: int
    num_failed: int
    reused: bool


def image_key(camera: str) -> str:
    """The data set feature of a camera."""
    return f"observation.images.{camera}"


def record_metaworld(settings: RecordSettings) -> RecordedDataset:
    """Record, continue or reuse the data set of `settings`, and print what there is.

    The same settings give the same episodes, to the bit, whatever the number of workers.

    Raises:
        ValueError: unknown task or camera, a task without instruction, or `root` holds something else.
        RuntimeError: nothing renders on this machine, or an expert fails over and over.
    """
    _check(settings)
    dataset = _record_or_reuse(Path(settings.root), settings)
    Console(quiet=not settings.progress).print(
        f"{'Reused' if dataset.reused else 'Recorded'} {dataset.root}: {dataset.num_episodes} episodes, "
        f"{dataset.num_frames} frames ({dataset.num_failed} failed attempts were drawn again)"
    )
    return dataset


def _record_or_reuse(root: Path, settings: RecordSettings) -> RecordedDataset:
    if root.exists() and any(root.iterdir()):
        return _reuse(root, settings)
    stage = RecordingStage(root.with_name(root.name + ".recording"), settings)
    _record_episodes(stage, settings)
    unfinished = stage.folder / "dataset"
    shutil.rmtree(unfinished, ignore_errors=True)
    manifest = _write_dataset(unfinished, stage, settings)
    instructions = sorted({episode["instruction"] for episode in manifest["episodes"]})
    build_tokenizer(instructions, unfinished / TOKENIZER_FOLDER, settings.vocab_size)
    write_json(unfinished / MANIFEST_FILE, manifest)
    root.parent.mkdir(parents=True, exist_ok=True)
    unfinished.rename(root)
    shutil.rmtree(stage.folder)
    return _describe(root, manifest, reused=False)


def read_manifest(root: str | Path) -> dict[str, Any]:
    """The settings and per-episode facts of a recorded data set.

    Raises:
        ValueError: the folder holds no finished recording.
    """
    path = Path(root) / MANIFEST_FILE
    if not path.exists():
        raise ValueError(
            f"{root} is not a finished recording: it has no {MANIFEST_FILE}. Record one with `lerobot data metaworld`, "
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


def _check(settings: RecordSettings) -> None:
    check_cameras(settings.cameras)
    check_state(settings.state)
    select_gl_backend()
    known = task_names()
    unknown = [task for task in settings.tasks if task not in known]
    if unknown:
        raise ValueError(f"Tasks must be MetaWorld's, got {unknown}. Tasks: {known}")
    for task in settings.tasks:
        instruction_for(task, settings.instructions)


def _reuse(root: Path, settings: RecordSettings) -> RecordedDataset:
    manifest = read_manifest(root)
    changed = differences(settings.dataset_settings(), manifest["settings"])
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


def _planned_episodes(settings: RecordSettings) -> list[tuple[str, int]]:
    return [(task, episode) for task in settings.tasks for episode in range(settings.num_episodes(task))]


def _record_episodes(stage: RecordingStage, settings: RecordSettings) -> None:
    plan = _planned_episodes(settings)
    console = Console(quiet=not settings.progress)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    num_failed = 0
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("Recording episodes", total=len(plan))
        for summary in _summaries(stage, plan, settings.num_workers):
            num_failed += summary.num_failed
            failures = f" ({num_failed} failed attempts drawn again)" if num_failed else ""
            progress.update(bar, advance=1, description=f"Recording {summary.task}{failures}")


def _summaries(stage: RecordingStage, plan: list[tuple[str, int]], num_workers: int) -> Iterator[EpisodeSummary]:
    if num_workers == 1:
        yield from (stage.record(task, episode) for task, episode in plan)
        return
    # Spawned, not forked: OpenGL contexts do not survive a fork.
    with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(stage.record, task, episode) for task, episode in plan]
        try:
            yield from (future.result() for future in as_completed(pending))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _features(settings: RecordSettings) -> dict[str, dict[str, Any]]:
    shape = (settings.image_size, settings.image_size, 3)
    features: dict[str, dict[str, Any]] = {
        image_key(camera): {
            "dtype": settings.storage,
            "shape": shape,
            "names": ["height", "width", "channels"],
        }
        for camera in settings.cameras
    }
    features["observation.state"] = {
        "dtype": "float32",
        "shape": (len(settings.state),),
        "names": list(settings.state),
    }
    features["action"] = {"dtype": "float32", "shape": (ACTION_DIM,), "names": list(ACTION_NAMES)}
    if settings.missing_camera_fraction > 0:
        features[CAMERA_IS_PAD] = {
            "dtype": "bool",
            "shape": (len(settings.cameras),),
            "names": [image_key(camera) for camera in settings.cameras],
        }
    return features


def _missing_cameras(settings: RecordSettings, num_episodes: int) -> list[str | None]:
    """Which camera each episode lacks: an exact share of the episodes, spread by the seed."""
    rng = np.random.default_rng([settings.seed, num_episodes])
    num_missing = round(settings.missing_camera_fraction * num_episodes)
    missing: list[str | None] = [None] * num_episodes
    for episode in rng.permutation(num_episodes)[:num_missing]:
        missing[episode] = settings.cameras[rng.integers(len(settings.cameras))]
    return missing


def _write_dataset(folder: Path, stage: RecordingStage, settings: RecordSettings) -> dict[str, Any]:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset.create(
        repo_id=settings.repo_id,
        fps=FPS,
        features=_features(settings),
        root=folder,
        robot_type="sawyer",
        use_videos=settings.storage == "video",
        vcodec=settings.video_codec,
        streaming_encoding=settings.storage == "video",
        encoder_queue_maxsize=settings.max_episode_steps,
    )
    plan = _planned_episodes(settings)
    missing = _missing_cameras(settings, len(plan))
    episodes = []
    console = Console(quiet=not settings.progress)
    with _no_bar_per_episode(), Progress(*Progress.get_default_columns(), console=console) as progress:
        for index in progress.track(range(len(plan)), description="Writing the data set"):
            task, episode = plan[index]
            demonstration = stage.load(task, episode)
            instruction = instruction_for(task, settings.instructions)
            _write_episode(dataset, demonstration, instruction, missing[index], settings)
            episodes.append(
                {
                    "episode_index": index,
                    "task": task,
                    "instruction": instruction,
                    "scene_seed": demonstration.seed,
                    "num_frames": len(demonstration.states),
                    "num_failed": demonstration.num_failed,
                    "noise": demonstration.noise,
                    "num_drift_steps": demonstration.num_drift_steps,
                    "missing_camera": missing[index],
                }
            )
    dataset.finalize()
    _write_exact_quantiles(folder, stage, plan)
    return {"settings": settings.dataset_settings(), "episodes": episodes}


@contextmanager
def _no_bar_per_episode() -> Iterator[None]:
    """Without the bar that Hugging Face `datasets` draws for every episode it embeds images of."""
    import datasets

    were_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            datasets.enable_progress_bars()


def _write_episode(
    dataset: "LeRobotDataset",
    demonstration: Demonstration,
    instruction: str,
    missing_camera: str | None,
    settings: RecordSettings,
) -> None:
    is_pad = np.array([camera == missing_camera for camera in settings.cameras])
    for step in range(len(demonstration.states)):
        frame: dict[str, Any] = {
            "observation.state": demonstration.states[step],
            "action": demonstration.actions[step],
            "task": instruction,
        }
        for camera, frames in demonstration.images.items():
            blank = camera == missing_camera
            frame[image_key(camera)] = np.zeros_like(frames[step]) if blank else frames[step]
        if settings.missing_camera_fraction > 0:
            frame[CAMERA_IS_PAD] = is_pad
        dataset.add_frame(frame)
    dataset.save_episode()


def _write_exact_quantiles(folder: Path, stage: RecordingStage, plan: list[tuple[str, int]]) -> None:
    """Replace the quantiles of state and action by those over all frames.

    LeRobot averages the quantiles of episodes (datasets/compute_stats.py, aggregate_feature_stats). Where a
    dimension is constant in each episode but differs between tasks, as the gripper effort is here, both
    averages are one number up to rounding, and normalising divides by that rounding error.
    """
    from lerobot.datasets.compute_stats import DEFAULT_QUANTILES
    from lerobot.datasets.io_utils import load_stats, write_stats

    stats = load_stats(folder)
    demonstrations = [stage.load(task, episode) for task, episode in plan]
    frames = {
        "observation.state": np.concatenate([demonstration.states for demonstration in demonstrations]),
        "action": np.concatenate([demonstration.actions for demonstration in demonstrations]),
    }
    for key, values in frames.items():
        for quantile in DEFAULT_QUANTILES:
            stats[key][f"q{int(quantile * 100):02d}"] = np.quantile(values.astype(np.float64), quantile, axis=0)
    write_stats(stats, folder)
