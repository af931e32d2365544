# SPDX-License-Identifier: Apache-2.0
"""Record MetaWorld demonstrations into a LeRobotDataset v3, with instructions and a tokenizer beside them.

Episodes are rendered by worker processes into a staging folder, then written with LeRobot's own writer into
a folder beside the final one, which is renamed when complete. An interrupted recording continues; a finished
one is reused; a data set recorded with other settings is never touched.
"""

import multiprocessing
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from embodix.data.recorded_dataset import (
    RecordedDataset,
    finish_dataset,
    image_key,
    no_bar_per_episode,
    require_place,
    reuse_dataset,
    write_exact_quantiles,
)
from embodix.data.tokenizer import require_vocab_size
from embodix.simulation.rendering import select_gl_backend
from embodix_metaworld.demonstrations import Demonstration, EpisodeSummary, RecordingStage, RecordSettings
from embodix_metaworld.simulator import ACTION_DIM, ACTION_NAMES, FPS, check_cameras, check_state
from embodix_metaworld.tasks import instruction_for, task_names

if TYPE_CHECKING:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

CAMERA_IS_PAD = "camera_is_pad"


def record_metaworld(settings: RecordSettings) -> RecordedDataset:
    """Record, continue or reuse the data set of `settings`, and print what there is.

    The same settings give the same episodes, to the bit, whatever the number of workers.

    Raises:
        ValueError: unknown task or camera, a task without instruction, or `root` holds something else.
        RuntimeError: nothing renders on this machine, or an expert fails over and over.
    """
    _check(settings)
    dataset = _record_or_reuse(Path(settings.root), settings)
    Console(quiet=not settings.progress).print(dataset.sentence)
    return dataset


def _record_or_reuse(root: Path, settings: RecordSettings) -> RecordedDataset:
    reused = reuse_dataset(root, settings.dataset_settings())
    if reused is not None:
        return reused
    stage = RecordingStage(root.with_name(root.name + ".recording"), settings)
    _record_episodes(stage, settings)
    unfinished = stage.folder / "dataset"
    shutil.rmtree(unfinished, ignore_errors=True)
    manifest = _write_dataset(unfinished, stage, settings)
    recorded = finish_dataset(unfinished, root, manifest, settings.vocab_size)
    shutil.rmtree(stage.folder)
    return recorded


def _check(settings: RecordSettings) -> None:
    require_place(Path(settings.root))
    require_vocab_size(settings.vocab_size)
    check_cameras(settings.cameras)
    check_state(settings.state)
    select_gl_backend()
    known = task_names()
    unknown = [task for task in settings.tasks if task not in known]
    if unknown:
        raise ValueError(f"Tasks must be MetaWorld's, got {unknown}. Tasks: {known}")
    for task in settings.tasks:
        instruction_for(task, settings.instructions)


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
    with no_bar_per_episode(), Progress(*Progress.get_default_columns(), console=console) as progress:
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
    demonstrations = [stage.load(task, episode) for task, episode in plan]
    write_exact_quantiles(
        folder,
        {
            "observation.state": np.concatenate([demonstration.states for demonstration in demonstrations]),
            "action": np.concatenate([demonstration.actions for demonstration in demonstrations]),
        },
    )
    return {"settings": settings.dataset_settings(), "episodes": episodes}


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
