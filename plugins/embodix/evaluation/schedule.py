# SPDX-License-Identifier: Apache-2.0
"""Which slot runs which episode: a pure function of the episodes and the order in which slots ask."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from embodix.evaluation.episodes import Episode


class Schedule:
    """Hands the episodes out to slots, each episode once.

    A slot keeps its task while that task has episodes left, since another task means another simulator. Then it
    goes where the fewest slots are, and among those where the most episodes are left.

    Args:
        episodes: what to run.
        num_slots: episodes simulated at once.
        num_groups: groups of slots that take turns; a slot belongs to group ``slot % num_groups``.

    Attributes:
        groups: the slots of each group; there are no more slots than episodes and no empty groups.
    """

    def __init__(self, episodes: Sequence[Episode], num_slots: int, num_groups: int) -> None:
        self._left: dict[str, deque[int]] = {}
        for index, episode in enumerate(episodes):
            self._left.setdefault(episode.task, deque()).append(index)
        num_slots = min(num_slots, len(episodes))
        num_groups = min(num_groups, num_slots)
        self.num_slots = num_slots
        self.groups = [list(range(group, num_slots, num_groups)) for group in range(num_groups)]
        self._task_of: dict[int, str] = {}
        self._first: dict[int, int | None] = {slot: self._take(slot) for slot in range(num_slots)}

    def next(self, slot: int) -> int | None:
        """The index of the slot's next episode, None when it has nothing left to do."""
        if slot in self._first:
            return self._first.pop(slot)
        return self._take(slot)

    def _take(self, slot: int) -> int | None:
        task = self._task_of.pop(slot, None)
        if task is None or not self._left[task]:
            task = self._neediest_task()
        if task is None:
            return None
        self._task_of[slot] = task
        return self._left[task].popleft()

    def _neediest_task(self) -> str | None:
        occupied = list(self._task_of.values())
        waiting = [task for task, indices in self._left.items() if indices]
        return min(waiting, key=lambda task: (occupied.count(task), -len(self._left[task])), default=None)
