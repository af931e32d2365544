# SPDX-License-Identifier: Apache-2.0
"""What a success rate has to be read against: the policy without its images or with other words, and acting blindly.

Some simulators vary their scenes so little that one fixed action sequence solves many of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embodix.data.recorded_dataset import MANIFEST_FILE, read_manifest
from embodix.evaluation.actors import PolicyActor

if TYPE_CHECKING:
    from lerobot.envs.configs import EnvConfig

    from embodix.checkpoints.policy_loading import LoadedPolicy


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


@dataclass(frozen=True)
class PolicyActors:
    """What one policy can be asked to act as.

    Attributes:
        name: of the policy, in results.
        wrong_prompt: what the wrong-prompt control says; None for another task's instruction.
        trained_instructions: what the tasks of its training data say.
    """

    loaded: LoadedPolicy
    env_cfg: EnvConfig
    name: str
    wrong_prompt: str | None
    trained_instructions: list[str]

    def require_wrong_prompt(self, tasks: Sequence[str]) -> None:
        """Refuse the wrong-prompt control before anything runs where no other words are known.

        Raises:
            ValueError: one task, and no other instruction in the training data.
        """
        if self.wrong_prompt is None and len(tasks) == 1 and len(self.trained_instructions) < 2:
            raise ValueError(
                f"The wrong-prompt control says what another task is, and there is only {tasks[0]}. Give its words: "
                "wrong_prompt='...', or evaluate several tasks."
            )

    def unseen_instructions(self, instructions: Mapping[str, str]) -> list[str]:
        """One sentence for each instruction that the policy was not trained on; none where its data are not known."""
        if not self.trained_instructions:
            return []
        unseen = [said for said in dict.fromkeys(instructions.values()) if said not in self.trained_instructions]
        return [f"It was told {said!r}, which no task of its training data says." for said in unseen if said]

    def of(self, kind: str, instructions: Mapping[str, str]) -> PolicyActor:
        """The actor of ``policy``, ``blank_image`` or ``wrong_prompt``.

        Args:
            instructions: task -> what its simulator says.
        """
        return PolicyActor(
            self.loaded.policy,
            self.loaded.preprocessor,
            self.loaded.postprocessor,
            self.env_cfg,
            blank_images=kind == "blank_image",
            instruction_of=self._wrong_words(instructions) if kind == "wrong_prompt" else None,
            name=self.name if kind == "policy" else f"{self.name}, {kind.replace('_', ' ')}",
        )

    def _wrong_words(self, instructions: Mapping[str, str]) -> Callable[[str], str]:
        words = self.wrong_prompt
        if words is not None:
            return lambda task: words
        return other_instructions(instructions, self.trained_instructions).__getitem__


def other_instructions(instructions: Mapping[str, str], further: Sequence[str] = ()) -> dict[str, str]:
    """For each task the instruction of the next task that says something else.

    Args:
        instructions: task -> what its simulator says.
        further: what the policy was trained on, taken where all tasks say the same.

    Raises:
        ValueError: all say the same.
    """
    tasks = list(instructions)
    others = {}
    for place, task in enumerate(tasks):
        following = [instructions[other] for other in [*tasks[place + 1 :], *tasks[:place]]]
        different = [instruction for instruction in [*following, *further] if instruction != instructions[task]]
        if not different:
            raise ValueError(
                "The wrong-prompt control gives a task the instruction of another, and all say "
                f"{instructions[task]!r}. Give its words: wrong_prompt='...'."
            )
        others[task] = different[0]
    return others
