# SPDX-License-Identifier: Apache-2.0
"""The simulators of a LeRobot environment config: its own, or any environment made by LeRobot's `make_env`.

Importing this module imports neither torch nor LeRobot.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodix import plugins
from embodix.contracts import Simulators, StepOutcome

# A plugin's environment that stands in for one of LeRobot's whose reset(seed=s) does not decide the episode, so that no
# result would repeat, is registered under LeRobot's type with this before it.
STANDS_IN = "embodix_"


def simulators_of(env_cfg: Any) -> Simulators:
    """The simulators of a LeRobot environment config.

    A config with a method `simulators()` decides itself; any other runs through LeRobot's own `make_env`.

    Raises:
        ValueError: an environment of LeRobot that ignores seeds; the message says what to use instead.
    """
    if hasattr(env_cfg, "simulators"):
        simulators: Simulators = env_cfg.simulators()
        return simulators
    return GymSimulators.of(env_cfg)


@dataclass(frozen=True)
class GymSimulators:
    """The one task of a LeRobot environment config."""

    env_cfg: Any
    tasks: tuple[str, ...]

    @classmethod
    def of(cls, env_cfg: Any) -> GymSimulators:
        """The simulators of a config.

        Raises:
            ValueError: the environment ignores seeds.
        """
        honours_seeds = f"{STANDS_IN}{env_cfg.type}"
        if honours_seeds in plugins.registry().names("environments"):
            raise ValueError(
                f"Every episode must be decided by its seed, and LeRobot's env.type={env_cfg.type} ignores seeds. "
                f"Use env.type={honours_seeds}, the same tasks with honoured seeds, or run "
                "`lerobot-eval`."
            )
        return cls(env_cfg, (env_cfg.task or env_cfg.type,))

    def build(self, task: str) -> GymSimulator:
        """The simulator of `task`, which must be the config's."""
        if task not in self.tasks:
            raise ValueError(f"env.type={self.env_cfg.type} has the task {self.tasks[0]!r}, got {task!r}.")
        return GymSimulator(self.env_cfg)


class GymSimulator:
    """One environment of `make_env(n_envs=1)`. It renders in every step, since the environment does."""

    def __init__(self, env_cfg: Any) -> None:
        import torch
        from lerobot.envs.factory import make_env
        from lerobot.envs.utils import add_envs_task

        self._envs = make_env(env_cfg, n_envs=1)
        ((vector_env,),) = [list(tasks.values()) for tasks in self._envs.values()]
        # The environment itself: the vector environment would reset it at the end of an episode.
        self._env = vector_env.envs[0]
        self.max_steps = int(vector_env.call("_max_episode_steps")[0])
        self.fps = int(self._env.metadata["render_fps"])
        self.instruction = str(add_envs_task(vector_env, {"batch": torch.zeros(1)})["task"][0])
        self._observation: dict[str, Any] = {}

    def reset(self, seed: int) -> None:
        """Start the episode of a seed."""
        self._observation, _ = self._env.reset(seed=seed)

    def observe(self) -> dict[str, Any]:
        """The environment's last observation."""
        return copy.deepcopy(self._observation)

    def step(self, action: np.ndarray) -> StepOutcome:
        """Apply one action (action_dim,)."""
        self._observation, reward, terminated, truncated, info = self._env.step(action)
        return StepOutcome(float(reward), bool(info.get("is_success", False)), bool(terminated or truncated))

    def frame(self) -> np.ndarray:
        """The environment's own rendering."""
        return np.asarray(self._env.render())

    def close(self) -> None:
        """Close the environment."""
        from lerobot.envs.utils import close_envs

        close_envs(self._envs)
