# SPDX-License-Identifier: Apache-2.0
"""Run episodes of many tasks together: one policy call for all that wait, simulators in worker processes.

Slots simulate one episode each. They form groups that take turns: while the policy computes for one group, the
simulators of the others run. A group asks when all its slots have an answer, in the order of the slots, and a slot
whose episode is over begins its next one while the others go on. So what is computed together depends on the
episodes, on `num_slots` and on `num_groups`, never on the number of workers or on time: results are equal to the bit
with any number of workers, and an episode whose simulator dies is repeated from its seed and its recorded actions
without anybody else noticing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from embodix.evaluation.actors import Actor, ExpertActor, Request
from embodix.evaluation.episodes import Begin, Command, Continue, Episode, EpisodeResult, Failed, Finished, Ready
from embodix.evaluation.workers import InProcess, Lost, Processes, Workers

if TYPE_CHECKING:
    from embodix.contracts import Simulators

OnResult = Callable[[EpisodeResult], None]


class SimulatorError(RuntimeError):
    """A simulator can't be set up here, or fails again and again."""


@dataclass(frozen=True)
class EngineSettings:
    """How episodes are run.

    Attributes:
        num_workers: processes for the simulators, 0 for none but this one. Changes no result.
        num_slots: episodes simulated at once. Like a batch size it is part of what defines a result to the last bit.
        num_groups: groups of slots that take turns; with 1 the policy waits for the simulators. Part of it too.
        videos: episodes of each task that are recorded, the first ones.
        videos_dir: where to; needed with `videos`.
        max_repeats: times that an episode is begun again after its simulator failed, before the run stops.
        worker_timeout_s: a worker without an answer for so long is killed and replaced.

    Raises:
        ValueError: a value out of range, or `videos` without `videos_dir`.
    """

    num_workers: int = 0
    num_slots: int = 8
    num_groups: int = 2
    videos: int = 0
    videos_dir: Path | None = None
    max_repeats: int = 3
    worker_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        least = {"num_workers": 0, "num_slots": 1, "num_groups": 1, "videos": 0, "max_repeats": 0}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"`{name}` must be at least {lowest}, got {getattr(self, name)}.")
        if self.worker_timeout_s <= 0:
            raise ValueError(f"`worker_timeout_s` must be positive, got {self.worker_timeout_s}.")
        if self.videos and self.videos_dir is None:
            raise ValueError(f"`videos_dir` must say where the {self.videos} videos of each task go.")


@dataclass
class _Attempt:
    """An episode in its slot: what it takes to begin it again."""

    index: int
    episode: Episode
    video: Path | None
    chunks: list[np.ndarray] = field(default_factory=list)
    num_repeats: int = 0


class Engine:
    """Simulators ready to run episodes; a context that closes them at its end.

    Several runs, of a policy and its controls for example, share the workers and the simulators they have built.

    Args:
        simulators: of an environment config, see `embodix.simulation.simulators.simulators_of`.
        settings: how to run.
    """

    def __init__(self, simulators: Simulators, settings: EngineSettings) -> None:
        self._simulators, self._settings = simulators, settings
        self.workers: Workers | None = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close simulators and workers."""
        if self.workers is not None:
            self.workers.close()
            self.workers = None

    def run(self, actor: Actor, episodes: Sequence[Episode], on_result: OnResult | None = None) -> list[EpisodeResult]:
        """The results of `episodes`, in their order.

        Args:
            actor: what acts.
            on_result: called with each result when it is there, in an order that does not depend on the workers.

        Raises:
            ValueError: a task that the simulators do not have, or an action that is not finite.
            SimulatorError: a simulator could not be set up, or an episode failed more than `max_repeats` times.
        """
        unknown = sorted({episode.task for episode in episodes} - set(self._simulators.tasks))
        if unknown:
            raise ValueError(f"Tasks must be among {list(self._simulators.tasks)}, got {unknown}.")
        if not episodes:
            return []
        if self.workers is None:
            self.workers = self._start_workers()
        with self._closed_on_error():
            return _Run(self.workers, self._settings, actor, episodes, on_result).results()

    def _start_workers(self) -> Workers:
        settings = self._settings
        if settings.num_workers == 0:
            return InProcess(self._simulators)
        num_workers = min(settings.num_workers, settings.num_slots)
        return Processes(self._simulators, worker_of_slots(settings, num_workers), settings.worker_timeout_s)

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Episodes that were cut off must not answer the next run."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def run_episodes(
    simulators: Simulators,
    actor: Actor,
    episodes: Sequence[Episode],
    settings: EngineSettings,
    on_result: OnResult | None = None,
) -> list[EpisodeResult]:
    """`Engine.run` on simulators that are closed afterwards."""
    with Engine(simulators, settings) as engine:
        return engine.run(actor, episodes, on_result)


def worker_of_slots(settings: EngineSettings, num_workers: int) -> list[int]:
    """The worker of each slot: the slots of every group are spread over the workers."""
    slots = range(settings.num_slots)
    if num_workers * settings.num_groups > settings.num_slots:
        return [slot % num_workers for slot in slots]
    return [slot // settings.num_groups % num_workers for slot in slots]


class EpisodeSchedule:
    """Hands the episodes out to slots, each once: a function of the episodes and the order in which slots ask.

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


class _Run:
    """One run of an actor over episodes."""

    def __init__(
        self,
        workers: Workers,
        settings: EngineSettings,
        actor: Actor,
        episodes: Sequence[Episode],
        on_result: OnResult | None,
    ) -> None:
        self._workers, self._settings, self._actor = workers, settings, actor
        self._episodes, self._on_result = episodes, on_result
        self._schedule = EpisodeSchedule(episodes, settings.num_slots, settings.num_groups)
        self._attempts: dict[int, _Attempt] = {}
        self._results: dict[int, EpisodeResult] = {}
        self._recorded = _recorded(episodes, settings.videos)

    def results(self) -> list[EpisodeResult]:
        """Let the groups take turns until every episode is over."""
        groups = self._schedule.groups
        for slots in groups:
            self._workers.send(self._begin(slots))
        while self._attempts:
            for slots in groups:
                self._turn([slot for slot in slots if slot in self._attempts])
        return [self._results[index] for index in range(len(self._episodes))]

    def _turn(self, slots: list[int]) -> None:
        """Wait for a group, ask the actor for it, and send it on."""
        if not slots:
            return
        replies = self._collect(slots)
        waiting = [reply for reply in replies if isinstance(reply, Ready)]
        for reply in replies:
            if isinstance(reply, Finished):
                self._finish(reply)
        commands: list[Command] = list(self._begin([reply.slot for reply in replies if isinstance(reply, Finished)]))
        self._workers.send([*commands, *self._act(waiting)])

    def _collect(self, slots: list[int]) -> list[Ready | Finished]:
        """The reply of each slot, in their order; what failed or was lost meanwhile is repeated."""
        replies: dict[int, Ready | Finished] = {}
        while len(replies) < len(slots):
            for reply in self._workers.receive([slot for slot in slots if slot not in replies]):
                if isinstance(reply, (Failed, Lost)):
                    self._workers.send([self._repeat(reply)])
                else:
                    replies[reply.slot] = reply
        return [replies[slot] for slot in slots]

    def _begin(self, slots: Sequence[int]) -> list[Begin]:
        """The next episode of each slot that has one."""
        commands = []
        for slot in slots:
            index = self._schedule.next(slot)
            if index is None:
                continue
            episode = self._episodes[index]
            self._actor.start(slot, episode)
            self._attempts[slot] = _Attempt(index, episode, self._video_path(index))
            commands.append(self._command(slot))
        return commands

    def _command(self, slot: int) -> Begin:
        attempt, actor = self._attempts[slot], self._actor
        return Begin(
            slot,
            attempt.episode,
            actor.num_observations,
            by_expert=isinstance(actor, ExpertActor),
            video=attempt.video,
            replay=tuple(attempt.chunks),
        )

    def _repeat(self, reply: Failed | Lost) -> Begin:
        attempt = self._attempts[reply.slot]
        if isinstance(reply, Failed) and not reply.can_repeat:
            raise SimulatorError(f"The simulator of {attempt.episode.task} can't be set up:\n{reply.reason}")
        if attempt.num_repeats >= self._settings.max_repeats:
            raise SimulatorError(
                f"Episode {attempt.episode} failed {attempt.num_repeats + 1} times after "
                f"{sum(map(len, attempt.chunks))} actions, more than max_repeats={self._settings.max_repeats} allows. "
                f"The last time: {reply.reason}"
            )
        attempt.num_repeats += 1
        logging.warning(
            "Episode %s is begun again (%d of at most %d times): %s",
            attempt.episode, attempt.num_repeats, self._settings.max_repeats, reply.reason,
        )  # fmt: skip
        return self._command(reply.slot)

    def _act(self, waiting: Sequence[Ready]) -> list[Continue]:
        if not waiting:
            return []
        requests = [
            Request(
                reply.slot,
                self._attempts[reply.slot].episode,
                reply.num_steps,
                reply.instruction,
                reply.observations,
            )
            for reply in waiting
        ]
        commands = []
        for request, actions_TA in zip(requests, self._actor.act(requests), strict=True):
            _check_actions(actions_TA, request, self._actor.name)
            self._attempts[request.slot].chunks.append(actions_TA)
            commands.append(Continue(request.slot, actions_TA))
        return commands

    def _finish(self, reply: Finished) -> None:
        attempt = self._attempts.pop(reply.slot)
        video = attempt.video
        result = EpisodeResult(
            episode=attempt.episode,
            success=reply.success,
            num_steps=reply.num_steps,
            sum_reward=reply.sum_reward,
            max_reward=reply.max_reward,
            num_repeats=attempt.num_repeats,
            video=None if video is None else f"{video.parent.name}/{video.name}",
            instruction=reply.instruction,
        )
        self._results[attempt.index] = result
        if self._on_result is not None:
            self._on_result(result)

    def _video_path(self, index: int) -> Path | None:
        if index not in self._recorded or self._settings.videos_dir is None:
            return None
        self._settings.videos_dir.mkdir(parents=True, exist_ok=True)
        episode = self._episodes[index]
        return self._settings.videos_dir / f"{episode.task.replace('/', '_')}_{episode.seed}.mp4"


def _check_actions(actions_TA: np.ndarray, request: Request, name: str) -> None:
    """Raise ValueError unless an actor gave at least one action, and finite ones."""
    where = f"in {request.episode} after {request.num_steps} steps"
    if actions_TA.ndim != 2 or not len(actions_TA):
        raise ValueError(f"Actions must be (n, action_dim), n at least 1; {name} gave {actions_TA.shape} {where}.")
    if not np.isfinite(actions_TA).all():
        raise ValueError(
            f"Actions must be finite; {name} gave {actions_TA[~np.isfinite(actions_TA)][0]} {where}. "
            "Look for NaN in its weights or statistics."
        )


def _recorded(episodes: Sequence[Episode], num_videos: int) -> set[int]:
    """The first `num_videos` episodes of each task."""
    of_task: dict[str, list[int]] = {}
    for index, episode in enumerate(episodes):
        of_task.setdefault(episode.task, []).append(index)
    return {index for indices in of_task.values() for index in indices[:num_videos]}
