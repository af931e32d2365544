# SPDX-License-Identifier: Apache-2.0
"""A LIBERO task (https://arxiv.org/abs/2306.03310) on upstream's own `LiberoEnv`: a seeded scene, the simulator of it.

Images and states are upstream's to the bit; what upstream computes beside them is not computed:

- It renders every camera in every step. Here the physics is copied at the moment at which upstream renders (robosuite
  samples its cameras within the step, not after it), and rendered only if somebody looks.
- It compiles the model and uploads it to the renderer anew in every reset. Here the compiled model is kept, and what a
  new one would differ in is put back.
- It resets once more when an episode ends.

Import this module after `embodix_libero.setup.activate_libero`, which spares LIBERO's question on the terminal,
and `embodix.simulation.rendering.select_gl_backend`, which robosuite follows when it is imported.
"""

import logging
from collections.abc import Iterable
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from types import SimpleNamespace
from typing import Any

import mujoco
import numpy as np

# robosuite asks for a file of private settings when it is imported.
logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
from lerobot.envs.libero import LiberoEnv, _get_suite, _select_task_ids  # noqa: E402
from libero.libero.envs import OffScreenRenderEnv  # noqa: E402

from embodix.contracts import StepOutcome  # noqa: E402
from embodix_libero.expert import LiberoExpert  # noqa: E402

# How often a new `LiberoEnv` has loaded its model when its first episode begins.
NUM_MODEL_LOADS = 3


@cache
def _suite(name: str) -> Any:
    """Upstream's suite, without the order of its tasks, which LIBERO prints."""
    with redirect_stdout(StringIO()):
        return _get_suite(name)


def task_numbers(suite: str, task_ids: Iterable[int] | None) -> list[int]:
    """The tasks of a suite, or those of them that are asked for.

    Raises:
        ValueError: unknown suite, or a number that the suite does not have.
    """
    return _select_task_ids(len(_suite(suite).tasks), task_ids)


class LiberoScene:
    """One LIBERO task with upstream's cameras and seeded resets.

    Args:
        suite, number: the task.
        render: "upstream", or "fast" for no shadows, reflections and multisampling.
        settings: arguments of upstream's `LiberoEnv`: cameras, image size, type of observation and so on.

    Attributes:
        instruction: the task in words.
        max_steps: upstream's limit for the suite, or what `settings` says.
        robosuite_env: LIBERO's own environment, with the whole state.

    Raises:
        ValueError: unknown suite.
    """

    def __init__(self, suite: str, number: int, render: str = "upstream", **settings: Any) -> None:
        self._env = _KeptModelEnv(_suite(suite), number, suite, **settings)
        self.instruction: str = self._env.task_description
        self.max_steps: int = self._env._max_episode_steps
        self.robosuite_env = self._env.robosuite_env
        if render == "fast":
            _render_fast(self.robosuite_env)
        self._cameras = _SampledCameras(self.robosuite_env, self._env.camera_name)

    def reset(self, seed: int) -> None:
        """Start from the task's initial state `seed` modulo their number (50); upstream's ten idle steps settle it."""
        self._env.reset_to(seed)

    def step(self, action: np.ndarray) -> tuple[float, bool]:
        """Apply an action (7,): translation, rotation, gripper, each in [-1, 1]. Returns the reward and the success."""
        _, reward, success, _ = self.robosuite_env.step(action)
        return float(reward), bool(success)

    def observation(self) -> dict[str, Any]:
        """Upstream's observation: ``pixels`` (uint8 (H, W, 3) by camera) and ``robot_state``; renders."""
        images = {name: self._cameras.image(name) for name in self._env.camera_name}
        return self._env._format_raw_obs(self.robosuite_env._get_observations() | images)

    def frame(self) -> np.ndarray:
        """The first camera, turned upright as upstream's `render` does, uint8 (H, W, 3)."""
        return np.ascontiguousarray(self._cameras.image(self._env.camera_name[0])[::-1, ::-1])

    def close(self) -> None:
        """Free the model and the renderer."""
        self._cameras.free()
        self._env.close()


class _KeptModelEnv(LiberoEnv):
    """Upstream's environment with a model that is loaded once instead of in every reset."""

    def _make_envs_task(self, task_suite: Any, task_id: int = 0) -> OffScreenRenderEnv:
        task = task_suite.get_task(task_id)
        self.task, self.task_description = task.name, task.language
        env = OffScreenRenderEnv(
            bddl_file_name=task_suite.get_task_bddl_file_path(task_id),
            camera_heights=self.observation_height,
            camera_widths=self.observation_width,
            hard_reset=False,
        )
        self.robosuite_env = env.env
        # Every loading of a model adds the samplers of its joints to this list once more, and each of them draws from
        # the random stream that then places the furniture.
        self.robosuite_env.object_property_initializers *= NUM_MODEL_LOADS
        return env

    def reset_to(self, seed: int) -> None:
        gripper = self.robosuite_env.robots[0].gripper
        gripper.current_action = np.zeros(gripper.dof)  # a new model has a new gripper
        self.init_state_id = seed
        self.reset(seed=seed)


class _SampledCameras:
    """Cameras that keep the physics of the moment at which upstream renders it, and render it when asked."""

    def __init__(self, robosuite_env: Any, names: list[str]) -> None:
        self._simulation = robosuite_env.sim
        self._context = robosuite_env.sim._render_context_offscreen
        self._sampled = mujoco.MjData(self._simulation.model._model)
        self._context.data = SimpleNamespace(_data=self._sampled)
        self._images: dict[str, np.ndarray] = {}
        self._render = {name: robosuite_env._observables[name]._sensor for name in names}
        for name in names:
            robosuite_env.modify_observable(name, "sensor", self._sensor(takes_copy=name == names[0]))

    def _sensor(self, takes_copy: bool) -> Any:
        def sample(_: dict[str, Any]) -> np.ndarray:
            if takes_copy:
                mujoco.mj_copyData(self._sampled, self._simulation.model._model, self._simulation.data._data)
                self._images = {}
            return np.zeros(1)

        sample.__modality__ = "image"  # type: ignore[attr-defined]  # as robosuite's decorator `sensor` does
        return sample

    def free(self) -> None:
        """Free the renderer now: at the end of the process, when robosuite would, EGL is gone and complains.

        What holds the model goes too: robosuite's sensors keep this object, and a model takes a gigabyte.
        """
        self._bind()
        self._context.con.free()
        self._context.gl_ctx.free()
        del self._context, self._sampled, self._simulation

    def _bind(self) -> None:
        """Make the renderer's OpenGL context the current one; robosuite leaves the one that was made last."""
        self._context.gl_ctx.make_current()

    def image(self, name: str) -> np.ndarray:
        """Upstream's image of a camera, uint8 (H, W, 3)."""
        if name not in self._images:
            self._bind()
            self._images[name] = np.array(self._render[name]({}))
        return self._images[name]


def _render_fast(robosuite_env: Any) -> None:
    """Leave out what a software renderer spends most of its time on; the images are then not upstream's."""
    context, model = robosuite_env.sim._render_context_offscreen, robosuite_env.sim.model._model
    model.vis.quality.shadowsize = 0
    model.vis.quality.offsamples = 0
    model.light_castshadow[:] = 0
    context.gl_ctx.make_current()
    context.con.free()
    context._set_mujoco_context_and_buffers()
    for flag in ("SHADOW", "REFLECTION", "SKYBOX", "HAZE"):
        context.scn.flags[getattr(mujoco.mjtRndFlag, f"mjRND_{flag}")] = 0


class LiberoSimulator:
    """One LIBERO task; an episode ends with its first success.

    Args:
        suite, number: the task.
        render: as for `LiberoScene`.
        fps: actions a second.
        settings: arguments of upstream's `LiberoEnv`.

    Raises:
        ValueError: unknown suite.
    """

    def __init__(self, suite: str, number: int, render: str, fps: int, **settings: Any) -> None:
        self._scene = LiberoScene(suite, number, render, **settings)
        self.instruction = self._scene.instruction
        self.max_steps = self._scene.max_steps
        self.fps = fps
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
