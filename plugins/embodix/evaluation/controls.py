# SPDX-License-Identifier: Apache-2.0
"""What acts without seeing: the floor that a success rate has to be read against.

Some simulators vary their scenes so little that one fixed action sequence solves many of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from embodix.data.recorded_dataset import MANIFEST_FILE, read_manifest


def applicable_controls(tasks: Sequence[str], recording: str | Path | None) -> list[str]:
    """The controls that can be run on an evaluation of `tasks`.

    ``blind`` replays demonstrations, so each task must have some in `recording`; ``wrong_prompt`` gives a task another
    task's instruction, so there must be several.
    """
    controls = ["blank_image"]
    if len(tasks) > 1:
        controls.append("wrong_prompt")
    if recording is not None and (Path(recording) / MANIFEST_FILE).is_file():
        recorded = {episode["task"] for episode in read_manifest(recording)["episodes"]}
        if set(tasks) <= recorded:
            controls.insert(0, "blind")
    return controls


def mean_action_sequence(root: str | Path, task: str, num_steps: int) -> np.ndarray:
    """The mean of a task's demonstrations, action by action, float32 (num_steps, action_dim).

    Demonstrations that began with a drift are left out, if others exist: they start elsewhere. A demonstration
    that is over holds its last action.

    Raises:
        ValueError: `root` is not a recording, or has no demonstration of the task.
    """
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    manifest = read_manifest(root)
    of_task = [episode for episode in manifest["episodes"] if episode["task"] == task]
    if not of_task:
        raise ValueError(f"{root} has no demonstration of {task!r}.")
    chosen = [episode for episode in of_task if episode["num_drift_steps"] == 0] or of_task
    dataset = LeRobotDataset(manifest["settings"]["repo_id"], root=root)
    columns = dataset.hf_dataset.select_columns(["action", "episode_index"]).with_format("numpy")[:]
    sequences = np.zeros((len(chosen), num_steps, columns["action"].shape[1]), np.float32)
    for row, episode in enumerate(chosen):
        actions = columns["action"][columns["episode_index"] == episode["episode_index"]][:num_steps]
        sequences[row, : len(actions)] = actions
        sequences[row, len(actions) :] = actions[-1]
    return sequences.mean(axis=0)
