# SPDX-License-Identifier: Apache-2.0
"""Episodes: which are run, how one runs on its simulator by command, and what it came to.

Commands and replies are plain data, so that slots may be in a worker process. Importing this module imports neither
torch nor LeRobot.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodix.contracts import HasExpert, Simulator, Simulators

Observation = dict[str, Any]


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


@dataclass(frozen=True)
class Begin:
    """Reset the slot's simulator to an episode, building it if it is of another task.

    Attributes:
        num_observations: how many of the latest observations a reply carries; with 0 nothing is rendered.
        by_expert: the simulator's scripted controller acts until the episode is over.
        video: where to write a video, None for none.
        replay: chunks of actions to apply at once, of an episode that was lost.
    """

    slot: int
    episode: Episode
    num_observations: int
    by_expert: bool = False
    video: Path | None = None
    replay: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class Continue:
    """Apply a chunk of actions (n, action_dim), or as many as the episode lasts."""

    slot: int
    actions_TA: np.ndarray


@dataclass(frozen=True)
class Ready:
    """The episode waits for actions; `observations` are the latest, oldest first."""

    slot: int
    num_steps: int
    instruction: str
    observations: tuple[Observation, ...]


@dataclass(frozen=True)
class Finished:
    """The episode is over."""

    slot: int
    success: bool
    num_steps: int
    sum_reward: float
    max_reward: float
    instruction: str


@dataclass(frozen=True)
class Failed:
    """The simulator raised an exception and is gone. `can_repeat` is False where it could not even be set up."""

    slot: int
    reason: str
    can_repeat: bool


Command = Begin | Continue
Reply = Ready | Finished | Failed


class RunningEpisode:
    """An episode under way on its simulator.

    Raises:
        ValueError: the expert is to act, and the simulator has none.
    """

    def __init__(self, simulator: Simulator, begin: Begin) -> None:
        if begin.by_expert and not isinstance(simulator, HasExpert):
            raise ValueError(f"The simulator of {begin.episode.task} has no scripted controller that could act.")
        self._simulator, self._begin = simulator, begin
        self._observations: deque[Observation] = deque(maxlen=max(begin.num_observations, 1))
        self._frames: list[np.ndarray] = []
        self._rewards: list[float] = []
        self._success = self._done = False

    def start(self) -> Ready | Finished:
        """Reset, and apply what there is to replay."""
        self._simulator.reset(self._begin.episode.seed)
        self._keep_frame()
        self._look(num_actions_left=0)
        if self._begin.by_expert:
            return self._run_expert()
        for actions_TA in self._begin.replay:
            self._apply(actions_TA)
        return self._report()

    def advance(self, actions_TA: np.ndarray) -> Ready | Finished:
        """Apply a chunk of actions."""
        self._apply(actions_TA)
        return self._report()

    def _run_expert(self) -> Ready | Finished:
        assert isinstance(self._simulator, HasExpert)
        while not self._done:
            self._step(self._simulator.expert_action())
        return self._report()

    def _apply(self, actions_TA: np.ndarray) -> None:
        for index, action in enumerate(actions_TA):
            if self._done:
                return
            self._step(action)
            self._look(num_actions_left=len(actions_TA) - index - 1)

    def _step(self, action: np.ndarray) -> None:
        outcome = self._simulator.step(action)
        self._rewards.append(outcome.reward)
        self._success |= outcome.success
        self._done = outcome.done or len(self._rewards) >= self._simulator.max_steps
        self._keep_frame()

    def _look(self, num_actions_left: int) -> None:
        """Observe, if the actor will see it: it asks when no action is left."""
        if not self._done and num_actions_left < self._begin.num_observations:
            self._observations.append(self._simulator.observe())

    def _keep_frame(self) -> None:
        if self._begin.video is not None:
            self._frames.append(self._simulator.frame())

    def _report(self) -> Ready | Finished:
        slot, instruction = self._begin.slot, self._simulator.instruction
        if not self._done:
            return Ready(slot, len(self._rewards), instruction, tuple(self._observations))
        if self._begin.video is not None:
            from lerobot.utils.io_utils import write_video

            write_video(str(self._begin.video), self._frames, self._simulator.fps)
        total, highest = float(np.sum(self._rewards)), float(np.max(self._rewards))
        return Finished(slot, self._success, len(self._rewards), total, highest, instruction)


class SlotSimulators:
    """The slots of one worker, each with the simulator of the task it is at."""

    def __init__(self, simulators: Simulators) -> None:
        self._simulators = simulators
        self._built: dict[int, tuple[str, Simulator]] = {}
        self._running: dict[int, RunningEpisode] = {}

    def answer(self, message: Sequence[Command]) -> Iterator[Reply]:
        """A reply to each command."""
        return map(self.execute, message)

    def execute(self, command: Command) -> Reply:
        """Do what is asked; an exception becomes a `Failed`, and the slot's simulator is given up."""
        can_repeat = True
        try:
            if isinstance(command, Continue):
                return self._running[command.slot].advance(command.actions_TA)
            can_repeat = False
            simulator = self._simulator_for(command.slot, command.episode.task)
            self._running[command.slot] = RunningEpisode(simulator, command)
            can_repeat = True
            return self._running[command.slot].start()
        except Exception:
            self._discard(command.slot)
            return Failed(command.slot, traceback.format_exc(), can_repeat)

    def close(self) -> None:
        """Close every simulator."""
        for slot in list(self._built):
            self._discard(slot)

    def _simulator_for(self, slot: int, task: str) -> Simulator:
        if slot in self._built and self._built[slot][0] != task:
            self._discard(slot)
        if slot not in self._built:
            self._built[slot] = (task, self._simulators.build(task))
        return self._built[slot][1]

    def _discard(self, slot: int) -> None:
        self._running.pop(slot, None)
        if slot in self._built:
            self._built.pop(slot)[1].close()
