# SPDX-License-Identifier: Apache-2.0
"""An evaluation: policies, controllers and controls on the same episodes, and the files that are left of it."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from embodix.evaluation.actors import Actor
from embodix.evaluation.engine import Engine, EngineSettings
from embodix.evaluation.episodes import Episode, EpisodeResult
from embodix.evaluation.progress import EvaluationProgress
from embodix.evaluation.simulators import SimulatorError
from embodix.report.evaluation import EPISODES_FILE, EpisodeRecord, append_episode, read_episodes

VIDEOS_FOLDER = "videos"


@dataclass(frozen=True)
class ActorRun:
    """One actor's episodes.

    Attributes:
        episodes: in the order of the plan.
        wall_s, cpu_s: what the episodes of this call took, all processes together.
    """

    episodes: list[EpisodeRecord]
    wall_s: float
    cpu_s: float

    @property
    def instructions(self) -> dict[str, str]:
        """What each task's simulator says."""
        return {episode.task: episode.instruction for episode in self.episodes}


class EvaluationSession:
    """Runs actors on the same episodes and keeps each episode in ``episodes.jsonl`` as soon as it is over.

    Episodes that the file holds already, of an interrupted evaluation, are not run again.

    Args:
        simulators: of the environment.
        episodes: what every actor runs.
        settings: of the engine; videos are of the policy or controller, not of its controls.
    """

    def __init__(
        self, simulators: Any, episodes: Sequence[Episode], settings: EngineSettings, progress: EvaluationProgress
    ) -> None:
        self.simulators, self.episodes, self.settings = simulators, list(episodes), settings
        self._progress = progress
        self.resumed = False

    def run(self, key: str, actor: Actor, folder: Path, *, videos: bool) -> ActorRun:
        """Run an actor on the episodes that ``folder`` does not hold yet.

        Args:
            key: of the actor in ``episodes.jsonl``: ``policy`` or the control's name.
            folder: for episodes and videos.

        Raises:
            ValueError: a simulator that can't be set up or fails again and again.
        """
        done = {record.key: record for record in read_episodes(folder / EPISODES_FILE).get(key, [])}
        left = [episode for episode in self.episodes if (episode.task, episode.seed) not in done]
        self.resumed |= bool(done) and bool(left)
        bar = self._progress.begin(actor.name, self.episodes)
        for record in done.values():
            bar.ended(record.task, record.success)

        def keep(result: EpisodeResult) -> None:
            record = episode_record(result)
            append_episode(folder / EPISODES_FILE, key, record)
            done[record.key] = record
            bar.ended(record.task, record.success)

        stopwatch = _Stopwatch()
        try:
            with Engine(self.simulators, self._settings(folder, videos)) as engine:
                engine.run(actor, left, keep)
        except SimulatorError as error:
            raise ValueError(f"{error}\nFinished episodes are kept in {folder / EPISODES_FILE}.") from error
        bar.close()
        return ActorRun([done[episode.task, episode.seed] for episode in self.episodes], *stopwatch.read())

    def _settings(self, folder: Path, videos: bool) -> EngineSettings:
        if not videos:
            return replace(self.settings, videos=0)
        return replace(self.settings, videos_dir=folder / VIDEOS_FOLDER)


def episode_record(result: EpisodeResult) -> EpisodeRecord:
    """An episode as the files keep it."""
    return EpisodeRecord(
        task=result.episode.task,
        seed=result.episode.seed,
        success=result.success,
        num_steps=result.num_steps,
        sum_reward=result.sum_reward,
        max_reward=result.max_reward,
        num_repeats=result.num_repeats,
        video=result.video,
        instruction=result.instruction,
    )


def default_num_workers() -> int:
    """The cores that this process may use but one, which computes the policy; 1 at least."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


class _Stopwatch:
    """Seconds since it was made: on the wall, and of the processor here and in the processes that have ended."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._wall, _cpu_seconds() - self._cpu


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
