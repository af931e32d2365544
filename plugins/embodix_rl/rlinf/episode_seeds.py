# SPDX-License-Identifier: Apache-2.0
"""Which episode each environment runs next."""

from __future__ import annotations

from dataclasses import dataclass, field


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
