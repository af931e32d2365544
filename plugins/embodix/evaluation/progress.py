# SPDX-License-Identifier: Apache-2.0
"""Episodes done and success so far: bars in a terminal, a line every tenth elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from embodix.evaluation.episodes import Episode

MAX_BARS = 12


class EvaluationProgress:
    """Shows one actor's episodes after another's; a context that clears its bars at the end.

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
