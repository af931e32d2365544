# SPDX-License-Identifier: Apache-2.0
"""A loaded policy as an actor: itself, or under one of its controls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lerobot.envs.configs import EnvConfig

from embodix.checkpoints.policy_loading import LoadedPolicy
from embodix.evaluation.actors import PolicyActor


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
