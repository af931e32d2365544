# SPDX-License-Identifier: Apache-2.0
"""A MetaWorld task as a seeded scene with named cameras (https://arxiv.org/abs/1910.10897).

MetaWorld ignores ``reset(seed=...)``; this scene honours seeds through ``env.seed`` and
``seeded_rand_vec``: the same seed gives the same goal and objects. Frames are rendered without shadows, reflections
and multisampling, where a software renderer spends most of its time, and antialiased by averaging
``SUPERSAMPLING`` x ``SUPERSAMPLING`` rendered pixels a stored one.
"""

import atexit
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from embodix.simulation.rendering import bind_gl_backend

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


def task_names() -> list[str]:
    """Every task of MetaWorld."""
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    return sorted(ALL_V3_ENVIRONMENTS)


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
