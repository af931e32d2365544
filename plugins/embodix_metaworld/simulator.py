# SPDX-License-Identifier: Apache-2.0
"""A MetaWorld task (https://arxiv.org/abs/1910.10897): a seeded scene with named cameras, and the engine's simulator.

MetaWorld ignores ``reset(seed=...)``; the scene honours seeds through ``env.seed`` and
``seeded_rand_vec``: the same seed gives the same goal and objects. Frames are rendered without shadows, reflections
and multisampling, where a software renderer spends most of its time, and antialiased by averaging
``SUPERSAMPLING`` x ``SUPERSAMPLING`` rendered pixels a stored one.

Importing this module imports neither torch nor LeRobot.
"""

from __future__ import annotations

import atexit
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from embodix.contracts import StepOutcome
from embodix.simulation.rendering import bind_gl_backend
from embodix_metaworld.tasks import instruction_for, task_names

ACTION_DIM = 4
STATE_NAMES = ("hand_x", "hand_y", "hand_z", "gripper_opening")  # the head of MetaWorld's observation
ACTION_NAMES = ("delta_x", "delta_y", "delta_z", "gripper_effort")
FPS = 80
# Without antialiasing a small image shows positions to a pixel only, about a centimetre here. Averaging 3 x 3 costs
# less than the renderer's own multisampling.
SUPERSAMPLING = 3
FRAME_SIZE, FRAME_SUPERSAMPLING = 240, 2


@dataclass(frozen=True)
class CameraView:
    """A camera of MetaWorld's model.

    `position` (metres) moves it, `fovy` (vertical field of view, degrees) narrows it, `tilt` (degrees) turns it
    upwards, `rotate` turns its upside-down image.
    """

    model_name: str
    fovy: float | None = None
    tilt: float = 0.0
    position: tuple[float, float, float] | None = None
    rotate: bool = False


CAMERA_VIEWS: dict[str, CameraView] = {
    # As in lerobot/envs/metaworld.py, drawn 10 cm along the table and narrowed from 60 degrees to where the task
    # happens: in a small image the objects then cover whole patches.
    "front": CameraView("corner2", position=(0.75, 0.175, 0.7), fovy=36.0, rotate=True),
    "lerobot_front": CameraView("corner2", position=(0.75, 0.075, 0.7), rotate=True),
    # Tilted forward as wrist cameras are, to see where the hand is going and not only the table below it.
    "gripper": CameraView("gripperPOV", tilt=30.0),
    "behind_gripper": CameraView("behindGripper"),
    "topview": CameraView("topview"),
    "corner": CameraView("corner"),
    "corner3": CameraView("corner3"),
}


def check_cameras(cameras: Sequence[str]) -> None:
    """Raise ValueError unless `cameras` is a non-empty list of known views, each with its own model camera."""
    unknown = sorted(set(cameras) - set(CAMERA_VIEWS))
    if unknown or not cameras or len(set(cameras)) != len(cameras):
        raise ValueError(
            f"Cameras must be different names of MetaWorld views, got {list(cameras)}. Views: {list(CAMERA_VIEWS)}."
        )
    model_names = [CAMERA_VIEWS[camera].model_name for camera in cameras]
    if len(set(model_names)) != len(model_names):
        raise ValueError(f"Every view must have a camera of its own, got {list(cameras)}, which are {model_names}.")


class MetaWorldScene:
    """One MetaWorld task with physics, named cameras and seeded resets.

    Args:
        task: MetaWorld name, for example ``button-press-topdown-v3``.
        cameras: names out of `CAMERA_VIEWS`; the renderer is made with the first image.
        image_size: height and width of every rendered image, pixels.

    Raises:
        ValueError: unknown task or camera.
        RuntimeError: no OpenGL backend renders on this machine.
    """

    def __init__(self, task: str, cameras: Sequence[str], image_size: int) -> None:
        check_cameras(cameras)
        bind_gl_backend()
        self.task = task
        self.cameras = tuple(cameras)
        self.image_size = image_size
        self.env = _make_task(task)
        self._renderer: Any = None
        self._frame_renderer: Any = None
        for camera in self.cameras:
            _aim(self.env.model.camera(CAMERA_VIEWS[camera].model_name), CAMERA_VIEWS[camera])

    def reset(self, seed: int | None = None) -> np.ndarray:
        """Reset; with a seed, to the goal and objects of that seed. Returns MetaWorld's observation (39,)."""
        if seed is not None:
            self.env.seed(seed)
        self.env.reset()
        return self._observe_from_rest()

    def _observe_from_rest(self) -> np.ndarray:
        """MetaWorld's observation of the state as it is, the previous one in it equal to the current one.

        Many tasks move their objects after the last computation of positions in reset, so that MetaWorld's own first
        observation, and a first frame, show them where an earlier draw had put them.
        """
        import mujoco

        mujoco.mj_forward(self.env.model, self.env.data)
        self.env._get_obs()
        return self.env._get_obs()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool]:
        """Apply an action (4,) in [-1, 1]. Returns the observation (39,), the reward and the success."""
        observation, reward, _, _, info = self.env.step(action)
        return observation, float(reward), bool(info["success"])

    def render(self) -> dict[str, np.ndarray]:
        """The image of every camera, uint8 (image_size, image_size, 3)."""
        return {camera: self._render_camera(CAMERA_VIEWS[camera]) for camera in self.cameras}

    def _render_camera(self, view: CameraView) -> np.ndarray:
        if self._renderer is None:
            self._renderer = _make_renderer(self.env.model, self.image_size * SUPERSAMPLING)
        return self._take(self._renderer, view, SUPERSAMPLING)

    def frame(self) -> np.ndarray:
        """The first camera's image for people to watch, uint8 (FRAME_SIZE, FRAME_SIZE, 3)."""
        if self._frame_renderer is None:
            self._frame_renderer = _make_renderer(self.env.model, FRAME_SIZE * FRAME_SUPERSAMPLING)
        return self._take(self._frame_renderer, CAMERA_VIEWS[self.cameras[0]], FRAME_SUPERSAMPLING)

    def _take(self, renderer: Any, view: CameraView, supersampling: int) -> np.ndarray:
        renderer.update_scene(self.env.data, view.model_name)
        image = _average_blocks(renderer.render(), supersampling)
        return np.ascontiguousarray(image[::-1, ::-1]) if view.rotate else image

    def close(self) -> None:
        """Free the OpenGL contexts."""
        for renderer in (self._renderer, self._frame_renderer):
            if renderer is not None:
                renderer.close()
        self._renderer = self._frame_renderer = None
        self.env.close()


def check_state(names: Sequence[str]) -> None:
    """Raise ValueError unless `names` is a non-empty list of different names out of `STATE_NAMES`."""
    if not names or not set(names) <= set(STATE_NAMES) or len(set(names)) != len(names):
        raise ValueError(f"`state` must be different names out of {list(STATE_NAMES)}, got {list(names)}.")


def robot_state(observation: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """What the robot knows of itself: hand position (metres), gripper opening in [0, 1]; float32 (len(names),)."""
    return observation[[STATE_NAMES.index(name) for name in names]].astype(np.float32)


def _make_task(task: str) -> Any:
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE

    constructors: Mapping[str, Any] = ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
    key = f"{task}-goal-observable"
    if key not in constructors:
        raise ValueError(f"Tasks must be MetaWorld's, got {task!r}. Tasks: {task_names()}")
    env = constructors[key](seed=0)
    env.seeded_rand_vec = True
    env._freeze_rand_vec = False  # lerobot/envs/metaworld.py: otherwise no randomisation
    env.max_path_length = np.inf  # episode length is the caller's
    return env


def _aim(camera: Any, view: CameraView) -> None:
    if view.position is not None:
        camera.pos[:] = view.position
    if view.fovy is not None:
        camera.fovy[:] = view.fovy
    if view.tilt:
        cosine, sine = np.cos(np.deg2rad(view.tilt)), np.sin(np.deg2rad(view.tilt))
        turn = np.array([[1.0, 0.0, 0.0], [0.0, cosine, -sine], [0.0, sine, cosine]])
        camera.mat0[:] = (camera.mat0.reshape(3, 3) @ turn).ravel()  # of a tracking camera, which has no pose itself


def _average_blocks(image: np.ndarray, size: int) -> np.ndarray:
    """The mean of each ``size`` x ``size`` block of pixels, uint8."""
    height, width, channels = image.shape
    blocks = image.reshape(height // size, size, width // size, size, channels)
    return np.rint(blocks.mean(axis=(1, 3))).astype(np.uint8)


def _make_renderer(model: Any, image_size: int) -> Any:
    import mujoco

    frame = model.vis.global_
    frame.offwidth, frame.offheight = max(frame.offwidth, image_size), max(frame.offheight, image_size)
    model.vis.quality.shadowsize = 0
    model.vis.quality.offsamples = 0
    model.light_castshadow[:] = 0
    renderer = mujoco.Renderer(model, image_size, image_size)
    for flag in ("SHADOW", "REFLECTION", "SKYBOX", "HAZE"):
        renderer.scene.flags[getattr(mujoco.mjtRndFlag, f"mjRND_{flag}")] = 0
    _renderers.add(renderer)
    _close_renderers_at_exit()
    return renderer


_renderers: weakref.WeakSet[Any] = weakref.WeakSet()


@cache
def _close_renderers_at_exit() -> None:
    """Free at exit what no close() freed: MuJoCo's own finalizer comes too late and prints a traceback.

    MuJoCo ends EGL at exit itself. Exit functions run last in, first out, so this is registered after MuJoCo's.
    """
    atexit.register(lambda: [renderer.close() for renderer in list(_renderers)])


@cache
def scripted_expert(task: str) -> Any:
    """MetaWorld's scripted policy of a task: ``get_action`` of the observation (39,) gives an action (4,)."""
    from metaworld.policies import ENV_POLICY_MAP

    experts: Mapping[str, Any] = ENV_POLICY_MAP
    return experts[task]()


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
