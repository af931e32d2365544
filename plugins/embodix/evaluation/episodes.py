# SPDX-License-Identifier: Apache-2.0
"""Which episodes an evaluation runs, and what each came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Episode:
    """An episode: its task, as the simulators list it, and the seed that decides its scene and the policy's noise."""

    task: str
    seed: int

    def __str__(self) -> str:
        return f"{self.task} with seed {self.seed}"


@dataclass(frozen=True)
class EpisodeResult:
    """Outcome of an episode.

    Attributes:
        num_steps: actions applied until success, the environment's end or the task's maximum.
        sum_reward, max_reward: over those steps.
        num_repeats: times it was begun again because its simulator failed or its worker process died. The only
            field that such an accident changes.
        video: of a recorded episode, relative to the folder that holds the folder of videos.
        instruction: what the simulator's task says, "" if nothing.
    """

    episode: Episode
    success: bool
    num_steps: int
    sum_reward: float
    max_reward: float
    num_repeats: int = 0
    video: str | None = None
    instruction: str = ""


def plan_episodes(tasks: Sequence[str], num_episodes: int, first_seed: int) -> list[Episode]:
    """The episodes of seeds ``first_seed`` .. ``first_seed + num_episodes - 1`` of every task, task by task.

    Raises:
        ValueError: no task, a task twice, fewer than one episode, or a negative seed.
    """
    if not tasks or len(set(tasks)) != len(tasks):
        raise ValueError(f"Tasks to evaluate must be at least one and all different, got {list(tasks)}.")
    if num_episodes < 1 or first_seed < 0:
        raise ValueError(
            f"An evaluation has at least 1 episode a task and seeds from 0, got num_episodes={num_episodes}, "
            f"first_seed={first_seed}."
        )
    return [Episode(task, first_seed + index) for task in tasks for index in range(num_episodes)]
