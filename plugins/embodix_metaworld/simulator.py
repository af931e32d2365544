# SPDX-License-Identifier: Apache-2.0
"""MetaWorld tasks as simulators of the evaluation engine; imports neither torch nor LeRobot."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embodix.contracts import StepOutcome
from embodix_metaworld.expert import scripted_expert
from embodix_metaworld.instructions import instruction_for
from embodix_metaworld.scene import FPS, STATE_NAMES, MetaWorldScene, check_state, robot_state


@dataclass(frozen=True)
class MetaWorldView:
    """What is seen of a MetaWorld task, and for how long: cameras, pixels, components of the state, actions."""

    cameras: tuple[str, ...] = ("front", "gripper")
    image_size: int = 56
    state: tuple[str, ...] = STATE_NAMES
    max_steps: int = 150


class MetaWorldSimulator:
    """One MetaWorld task; an episode ends with its first success.

    Args:
        task: MetaWorld name.
        view: what is observed.
        instruction: the task in words, None for the recorder's.

    Raises:
        ValueError: unknown task, camera or state component, or a task without instruction.
        RuntimeError: no OpenGL backend renders on this machine.
    """

    fps = FPS

    def __init__(self, task: str, view: MetaWorldView, instruction: str | None = None) -> None:
        check_state(view.state)
        self.instruction = instruction_for(task) if instruction is None else instruction
        self.max_steps = view.max_steps
        self.num_steps = 0
        self.scene = MetaWorldScene(task, view.cameras, view.image_size)
        self._state = view.state
        self._raw_observation = np.zeros(0)

    def reset(self, seed: int | None) -> None:
        """Start the episode of a seed; with None the next one of the last seed's stream."""
        self._raw_observation, self.num_steps = self.scene.reset(seed), 0

    def observe(self) -> dict[str, Any]:
        """``pixels`` by camera, uint8 (image_size, image_size, 3), and ``agent_pos``, float32 (num_state,)."""
        return {"pixels": self.scene.render(), "agent_pos": self.robot_state()}

    def robot_state(self) -> np.ndarray:
        """The chosen components of the robot's state, float32 (num_state,)."""
        return robot_state(self._raw_observation, self._state)

    def step(self, action: np.ndarray) -> StepOutcome:
        """Apply an action (4,), clipped to [-1, 1]."""
        self._raw_observation, reward, success = self.scene.step(np.clip(action, -1.0, 1.0))
        self.num_steps += 1
        return StepOutcome(reward, success, done=success or self.num_steps >= self.max_steps)

    def frame(self) -> np.ndarray:
        """The first camera, large enough to watch, uint8 (H, W, 3)."""
        return self.scene.frame()

    def expert_action(self) -> np.ndarray:
        """The action of MetaWorld's scripted policy, float32 (4,)."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Constant")  # that the environment clips to [-1, 1], as is done here
            action = scripted_expert(self.scene.task).get_action(self._raw_observation)
        return np.clip(action, -1.0, 1.0).astype(np.float32)

    def close(self) -> None:
        """Free the renderers."""
        self.scene.close()


@dataclass(frozen=True)
class MetaWorldSimulators:
    """Tasks of MetaWorld that are seen alike. `instructions` has the tasks whose words are not the recorder's."""

    tasks: tuple[str, ...]
    view: MetaWorldView
    instructions: Mapping[str, str] = field(default_factory=dict)
    env_cfg: Any = None

    def build(self, task: str) -> MetaWorldSimulator:
        """The simulator of a task."""
        return MetaWorldSimulator(task, self.view, self.instructions.get(task))

    def __getstate__(self) -> dict[str, Any]:
        # The config's class lives beside LeRobot's: unpickling it would import torch in every worker.
        return {**vars(self), "env_cfg": None}


def view_of(cameras: Sequence[str], image_size: int, state: Sequence[str], max_steps: int) -> MetaWorldView:
    """A view from the lists of a config."""
    return MetaWorldView(tuple(cameras), image_size, tuple(state), max_steps)
