# SPDX-License-Identifier: Apache-2.0
"""The episodes of RLinf's environments: their seeds, and what is told of them (``infos["episode"]``).

Shape suffixes: B environments, C action steps of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass
class EpisodeSeeds:
    """Seeds of the episodes of one rank and stage: no two episodes of a run share one, except within a group.

    Attributes:
        first: seed of the first episode of the run.
        num_envs: environments of this rank and stage.
        group_size: environments that get the same seeds.
        place: number of the rank and stage.
        num_places: ranks times stages.
    """

    first: int
    num_envs: int
    group_size: int
    place: int
    num_places: int
    _begun: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.num_envs % self.group_size:
            raise ValueError(f"{self.num_envs} environments are no whole groups of {self.group_size}.")
        self.restart()

    def restart(self) -> None:
        """The next episodes are the first ones again."""
        self._begun = [0] * self.num_envs

    @property
    def num_begun(self) -> list[int]:
        """Episodes that each environment has begun."""
        return list(self._begun)

    def skip(self, num_begun: list[int]) -> None:
        """Go on as if so many episodes of each environment had been begun."""
        self._begun = list(num_begun)

    def group(self, env: int) -> int:
        """The number of an environment's group among all of the run."""
        return self.place * (self.num_envs // self.group_size) + env // self.group_size

    def next(self, env: int) -> int:
        """The seed of an environment's next episode."""
        num_groups = self.num_places * (self.num_envs // self.group_size)
        seed = self.first + self._begun[env] * num_groups + self.group(env)
        self._begun[env] += 1
        return seed


class EpisodeStatistics:
    """Return, length and success of the running episodes of B environments.

    Shape suffixes: B environments, C action steps of a chunk.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_steps = np.zeros(num_envs, np.int64)
        self._returns = np.zeros(num_envs)
        self._success = np.zeros(num_envs, bool)
        self._success_at_end = np.zeros(num_envs, bool)

    def begin(self, which_B: np.ndarray) -> None:
        """Start the episodes of some environments."""
        for values in (self.num_steps, self._returns, self._success, self._success_at_end):
            values[which_B] = 0

    def add(self, rewards_BC: np.ndarray, success_B: np.ndarray, steps_B: np.ndarray | None = None) -> None:
        """Add a chunk.

        Args:
            steps_B: action steps that were run; all of the chunk if None.
        """
        self.num_steps += rewards_BC.shape[1] if steps_B is None else steps_B
        self._returns += rewards_BC.sum(axis=1)
        self._success |= success_B
        self._success_at_end = success_B.copy()

    def tensors(self) -> dict[str, Tensor]:
        """As RLinf reads them, [B] each."""
        lengths_B = torch.from_numpy(self.num_steps.copy())
        returns_B = torch.from_numpy(self._returns.copy()).float()
        return {
            "success_once": torch.from_numpy(self._success.copy()),
            "success_at_end": torch.from_numpy(self._success_at_end.copy()),
            "return": returns_B,
            "episode_len": lengths_B,
            "reward": returns_B / lengths_B.clamp(min=1),
        }
