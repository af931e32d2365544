# SPDX-License-Identifier: Apache-2.0
"""An evaluation: policies, controllers and controls on the same episodes, what is shown meanwhile and left of it."""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from embodix.evaluation.actors import Actor
from embodix.evaluation.engine import Engine, EngineSettings, SimulatorError
from embodix.evaluation.episodes import Episode, EpisodeResult
from embodix.report.evaluation import EPISODES_FILE, EpisodeRecord, append_episode, read_episodes

VIDEOS_FOLDER = "videos"
MAX_BARS = 12


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
    """An episode as the files keep it; a reward that is not finite is none."""
    return EpisodeRecord(
        task=result.episode.task,
        seed=result.episode.seed,
        success=result.success,
        num_steps=result.num_steps,
        sum_reward=result.sum_reward if math.isfinite(result.sum_reward) else None,
        max_reward=result.max_reward if math.isfinite(result.max_reward) else None,
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


class EvaluationProgress:
    """Episodes done and success so far: bars in a terminal, a line every tenth elsewhere.

    It is a context that clears its bars at the end.

    Args:
        console: where to; None for standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._bars = self._new_bars() if self._console.is_terminal else None

    def __enter__(self) -> EvaluationProgress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def begin(self, actor: str, episodes: Sequence[Episode]) -> ActorProgress:
        """Start counting the episodes of an actor."""
        return ActorProgress(actor, episodes, self._console, self._bars)

    def _new_bars(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[solved]}"),
            TimeRemainingColumn(),
            console=self._console,
        )


class ActorProgress:
    """Counts one actor's episodes, over all and of each task."""

    def __init__(self, actor: str, episodes: Sequence[Episode], console: Console, bars: Progress | None) -> None:
        self._actor, self._console, self._bars = actor, console, bars
        self._num_episodes, self._num_done, self._num_solved = len(episodes), 0, 0
        tasks = list(dict.fromkeys(episode.task for episode in episodes))
        self._of_task = {task: [0, 0] for task in tasks}
        self._bar_of: dict[str, TaskID] = {}
        if bars is not None:
            self._bar_of[""] = bars.add_task(actor, total=len(episodes), solved="")
            for task in tasks if 1 < len(tasks) <= MAX_BARS else ():
                total = sum(episode.task == task for episode in episodes)
                self._bar_of[task] = bars.add_task(f"  {task}", total=total, solved="")

    def ended(self, task: str, success: bool) -> None:
        """An episode is over."""
        before = self._tenths()
        self._num_done += 1
        self._num_solved += success
        counts = self._of_task[task]
        counts[0] += 1
        counts[1] += success
        if self._bars is not None:
            for name, (done, solved) in {"": (self._num_done, self._num_solved), task: counts}.items():
                if name in self._bar_of:
                    self._bars.update(self._bar_of[name], completed=done, solved=_solved(solved, done))
        elif self._tenths() > before:
            self._console.print(
                f"{self._actor}: {self._num_done}/{self._num_episodes} episodes, "
                f"{_solved(self._num_solved, self._num_done)}",
                highlight=False,
            )

    def _tenths(self) -> int:
        return 10 * self._num_done // self._num_episodes

    def close(self) -> None:
        """Keep the actor's bar and take those of its tasks away."""
        if self._bars is not None:
            for task, bar in self._bar_of.items():
                if task:
                    self._bars.remove_task(bar)


def _solved(num_solved: int, num_done: int) -> str:
    return f"{num_solved} solved ({100 * num_solved / num_done:.0f} %)"
