# SPDX-License-Identifier: Apache-2.0
"""LIBERO tasks as simulators of the evaluation engine.

Import it after `activate_libero` and `select_gl_backend`, as `embodix_libero.scene`.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from embodix.contracts import StepOutcome
from embodix_libero.expert import LiberoExpert
from embodix_libero.scene import LiberoScene

if TYPE_CHECKING:
    from embodix_libero.environment import EmbodixLiberoConfig


class LiberoSimulator:
    """One LIBERO task; an episode ends with its first success.

    Args:
        cfg: as upstream's config, and the rendering.
        suite, number: the task.

    Raises:
        ValueError: unknown suite.
    """

    def __init__(self, cfg: "EmbodixLiberoConfig", suite: str, number: int) -> None:
        self._scene = LiberoScene(
            suite,
            number,
            cfg.render,
            episode_length=cfg.episode_length,
            camera_name=cfg.camera_name,
            obs_type=cfg.obs_type,
            observation_width=cfg.observation_width,
            observation_height=cfg.observation_height,
            init_states=cfg.init_states,
            camera_name_mapping=cfg.camera_name_mapping,
            control_mode=cfg.control_mode,
        )
        self.instruction = self._scene.instruction
        self.max_steps = self._scene.max_steps
        self.fps = cfg.fps
        self._num_steps = 0
        self._expert: LiberoExpert | None = None

    def reset(self, seed: int) -> None:
        """Start from the initial state that the seed numbers."""
        self._num_steps, self._expert = 0, None
        self._scene.reset(seed)

    def step(self, action: np.ndarray) -> StepOutcome:
        """Apply an action (7,): translation, rotation, gripper, each in [-1, 1]."""
        reward, success = self._scene.step(action)
        self._num_steps += 1
        return StepOutcome(reward, success, done=success or self._num_steps >= self.max_steps)

    def observe(self) -> dict[str, Any]:
        """Upstream's observation: ``pixels`` (uint8 (H, W, 3) by camera) and ``robot_state``."""
        return self._scene.observation()

    def frame(self) -> np.ndarray:
        """The first camera, upright, uint8 (H, W, 3)."""
        return self._scene.frame()

    def expert_action(self) -> np.ndarray:
        """The scripted controller's action, float32 (7,).

        Raises:
            ValueError: the controller does not know how to do this task.
        """
        if self._expert is None:
            self._expert = LiberoExpert(self._scene.robosuite_env)
        return self._expert.action()

    def close(self) -> None:
        """Free the model and the renderer."""
        self._scene.close()
