# SPDX-License-Identifier: Apache-2.0
"""A simulator that takes no time, and one that has accidents: what an evaluation engine has to survive."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from embodix.contracts import StepOutcome
from embodix.evaluation.episodes import Episode

REACH = 0.15  # how near the goal is success
STRIDE = 0.2  # of an action of 1
IMAGE_SIZE = 16


@dataclass(frozen=True)
class Accident:
    """What happens before an action of an episode, a limited number of times.

    Attributes:
        kind: ``kill`` ends the process as the kernel would, ``raise`` is an exception, ``hang`` never returns.
        step: actions applied before.
        ledger: a folder that counts the accidents; a worker that is replaced has no other memory.
    """

    kind: Literal["kill", "raise", "hang"]
    episode: Episode
    step: int
    ledger: Path
    times: int = 1

    def happen(self, episode: Episode, step: int) -> None:
        """Have the accident if it is due."""
        num_happened = len(list(self.ledger.iterdir()))
        if (episode, step) != (self.episode, self.step) or num_happened >= self.times:
            return
        (self.ledger / str(num_happened)).touch()
        if self.kind == "raise":
            raise RuntimeError("the simulator exploded")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(60)


@dataclass(frozen=True)
class PointSimulators:
    """Tasks of `PointSimulator`; ``unbuildable`` ones raise."""

    tasks: tuple[str, ...] = ("north", "south")
    max_steps: int = 12
    accident: Accident | None = None
    unbuildable: tuple[str, ...] = ()

    @property
    def env_cfg(self) -> Any:
        """A config of LeRobot whose own processors do nothing."""
        from lerobot.envs.configs import EnvConfig

        class PointEnv(EnvConfig):
            type: ClassVar[str] = "point"
            gym_kwargs: ClassVar[dict[str, Any]] = {}

        return PointEnv()

    def build(self, task: str) -> PointSimulator:
        """The simulator of a task."""
        if task in self.unbuildable:
            raise FileNotFoundError(f"the assets of {task} are missing")
        return PointSimulator(task, self.max_steps, self.accident)


class PointSimulator:
    """A point in a plane that is to reach a goal, seen from above; the seed draws both."""

    fps = 10

    def __init__(self, task: str, max_steps: int, accident: Accident | None = None) -> None:
        self.instruction, self.max_steps = f"Go {task}", max_steps
        self._task, self._accident = task, accident
        self._point: np.ndarray = np.zeros(2)
        self._goal: np.ndarray = np.zeros(2)
        self._seed, self._num_steps = 0, 0

    def reset(self, seed: int) -> None:
        """Draw point and goal."""
        rng = np.random.default_rng([seed, *self._task.encode()])
        self._point, self._goal = rng.uniform(-1, 1, 2), rng.uniform(-1, 1, 2)
        self._seed, self._num_steps = seed, 0

    def observe(self) -> dict[str, Any]:
        """``pixels`` of the camera ``front`` and ``agent_pos`` (2,)."""
        return {"pixels": {"front": self.frame()}, "agent_pos": self._point.astype(np.float32)}

    def step(self, action: np.ndarray) -> StepOutcome:
        """Move by an action (2,)."""
        if self._accident is not None:
            self._accident.happen(Episode(self._task, self._seed), self._num_steps)
        self._point = self._point + STRIDE * np.clip(action, -1, 1)
        self._num_steps += 1
        distance = float(np.linalg.norm(self._point - self._goal))
        return StepOutcome(-distance, success=distance < REACH, done=distance < REACH)

    def expert_action(self) -> np.ndarray:
        """Straight to the goal."""
        return np.clip((self._goal - self._point) / STRIDE, -1, 1).astype(np.float32)

    def frame(self) -> np.ndarray:
        """The point in red and the goal in green, uint8 (16, 16, 3)."""
        image = np.zeros((IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
        for channel, place in enumerate((self._point, self._goal)):
            row, column = np.clip((place + 1) / 2 * (IMAGE_SIZE - 1), 0, IMAGE_SIZE - 1).astype(int)
            image[row, column, channel] = 255
        return image

    def close(self) -> None:
        """Nothing to free."""
