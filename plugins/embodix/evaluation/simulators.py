# SPDX-License-Identifier: Apache-2.0
"""What the evaluation engine asks of a simulator, and the simulators of a LeRobot environment config.

Importing this module imports neither torch nor LeRobot: worker processes do, and start faster without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of one action. `done` ends the episode; so does the simulator's `max_steps`."""

    reward: float
    success: bool
    done: bool


class SimulatorError(RuntimeError):
    """A simulator can't be set up here, or fails again and again."""


class Simulator(Protocol):
    """One task in one process.

    An episode is a function of the seed given to `reset` and of the actions, whatever ran before: the engine
    repeats an episode that was lost from these alone.

    Attributes:
        instruction: the task in words, "" if it has none.
        max_steps: actions after which an episode is over.
        fps: actions a second, for videos.
    """

    instruction: str
    max_steps: int
    fps: int

    def reset(self, seed: int) -> None:
        """Start the episode of a seed."""

    def observe(self) -> dict[str, Any]:
        """The observation of one gym environment, as LeRobot's `preprocess_observation` takes it without batch
        dimension. Images are rendered here and not in `step`: most steps of a chunk are never looked at."""

    def step(self, action: np.ndarray) -> StepOutcome:
        """Apply one action (action_dim,)."""

    def frame(self) -> np.ndarray:
        """What a person would want to see of the present state, uint8 (H, W, 3)."""

    def close(self) -> None:
        """Free everything."""


@runtime_checkable
class HasExpert(Protocol):
    """A simulator with a scripted controller that sees its whole state."""

    def expert_action(self) -> np.ndarray:
        """The controller's action (action_dim,) in the present state."""


class Simulators(Protocol):
    """The tasks of an environment config, and how to build their simulators.

    It is pickled and sent to worker processes. What a worker does not need, such as `env_cfg`, should be left out
    of the pickle (``__getstate__``) where its class would import torch.

    """

    @property
    def env_cfg(self) -> Any:
        """LeRobot's config, for its `make_env_pre_post_processors`."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks."""

    def build(self, task: str) -> Simulator:
        """The simulator of a task."""


def simulators_of(env_cfg: Any) -> Simulators:
    """The simulators of a LeRobot environment config.

    A config with a method `simulators()` decides itself; any other runs through LeRobot's own `make_env`.

    Raises:
        ValueError: an environment of LeRobot that ignores seeds; the message says what to use instead.
    """
    if hasattr(env_cfg, "simulators"):
        simulators: Simulators = env_cfg.simulators()
        return simulators
    from embodix.evaluation.gym_simulators import GymSimulators

    return GymSimulators.of(env_cfg)
