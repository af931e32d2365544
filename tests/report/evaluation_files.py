# SPDX-License-Identifier: Apache-2.0
"""Results of evaluations with chosen outcomes, written as `lerobot eval` writes them."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np

from embodix.report.evaluation import EpisodeRecord, EvaluationRun, results_record, write_results

TASKS = {"reach-v3": "Reach", "drawer-close-v3": "Close the drawer"}


def episodes(num_solved: int, num_episodes: int = 20, videos: int = 0) -> list[EpisodeRecord]:
    """Episodes of every task, the first ones solved; the first ones recorded."""
    return [
        EpisodeRecord(
            task,
            100_000 + index,
            success=index < num_solved,
            num_steps=40 + index if index < num_solved else 150,
            sum_reward=10.0 * index,
            max_reward=1.0,
            video=f"videos/{task}_{100_000 + index}.mp4" if index < videos else None,
            instruction=instruction,
        )
        for task, instruction in TASKS.items()
        for index in range(num_episodes)
    ]


def write_evaluation(folder: Path, name: str, num_solved: int, *, videos: int = 0, resumed: bool = False) -> Path:
    """One folder of results with two controls; returns the path of ``results.json``."""
    run = EvaluationRun(
        name=name,
        checkpoint=f"outputs/{name}/checkpoints/000800",
        policy={"type": "pi05", "features": {"packing": "padding_free"}, "notes": ["It was told 'Reach'."]},
        env={"type": "embodix_metaworld", "task": ",".join(TASKS)},
        settings={"n_episodes": 20, "first_seed": 100_000, "resumed": resumed},
        wall_s=12.5,
        cpu_s=20.0,
    )
    of_policy = episodes(num_solved, videos=videos)
    for episode in of_policy:
        if episode.video is not None:
            write_video(folder / episode.video)
    controls = {"blind": episodes(3), "blank_image": episodes(0)}
    return write_results(folder, results_record(run, of_policy, controls))


def write_video(path: Path, num_frames: int = 9) -> None:
    """A video that goes from dark to bright, 32 pixels high and 48 wide."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for index in range(num_frames):
            picture = np.full((32, 48, 3), 255 * index // (num_frames - 1), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
