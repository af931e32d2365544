# SPDX-License-Identifier: Apache-2.0
"""What acts without seeing: the floor that a success rate has to be read against.

MetaWorld varies its scenes so little that one fixed action sequence solves many of them.
"""

from pathlib import Path

import numpy as np

from embodix.data.metaworld import read_manifest
from embodix.data.metaworld_scene import ACTION_DIM, MetaWorldScene
from embodix.evaluation.metaworld import EmbodixMetaworldConfig, SeededEpisode
from embodix.evaluation.rollout import Evaluation


def mean_action_sequence(root: str | Path, task: str, num_steps: int) -> np.ndarray:
    """The mean of a task's demonstrations, action by action, float32 (num_steps, 4).

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
    sequences = np.zeros((len(chosen), num_steps, ACTION_DIM), np.float32)
    for row, episode in enumerate(chosen):
        actions = columns["action"][columns["episode_index"] == episode["episode_index"]][:num_steps]
        sequences[row, : len(actions)] = actions
        sequences[row, len(actions) :] = actions[-1]
    return sequences.mean(axis=0)


def blind_control(root: str | Path, env: EmbodixMetaworldConfig, *, num_episodes: int, start_seed: int) -> Evaluation:
    """Replay the mean demonstration of `env.task`, blind to everything, on the seeds of `evaluate_policy`.

    Raises:
        ValueError: `root` is not a recording, or has no demonstration of the task.
    """
    actions_TA = mean_action_sequence(root, env.task, env.episode_length)
    scene = MetaWorldScene(env.task, env.cameras, env.image_size)
    try:
        episodes = [_replay(scene, actions_TA, start_seed + index) for index in range(num_episodes)]
    finally:
        scene.close()
    return Evaluation("blind: mean demonstration", env.task, tuple(episodes))


def _replay(scene: MetaWorldScene, actions_TA: np.ndarray, seed: int) -> SeededEpisode:
    scene.reset(seed)
    for step, action in enumerate(actions_TA):
        _, _, success = scene.step(action)
        if success:
            return SeededEpisode(seed, success=True, num_steps=step + 1)
    return SeededEpisode(seed, success=False, num_steps=len(actions_TA))
