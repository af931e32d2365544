# SPDX-License-Identifier: Apache-2.0
"""Demonstrations by MetaWorld's scripted experts, with the disturbances a learner needs to see.

An expert alone visits one thin path, and a policy that errs off it has seen nothing. So the executed
action is disturbed while the recorded one is what the expert wanted (DART, https://arxiv.org/abs/1703.09327),
some episodes start with a drift to another place and are shoved off their path later.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from embodix_metaworld.record_settings import RecordSettings
from embodix_metaworld.scene import ACTION_DIM, MetaWorldScene, robot_state

MAX_ATTEMPTS = 50


@dataclass(frozen=True)
class Demonstration:
    """A successful episode of T frames.

    `states` (T, num_state) and `actions` (T, 4) float32; `images` by camera, uint8 (T, H, W, 3); `seed` is the scene's;
    `num_failed` counts the attempts thrown away before; `noise` is the standard deviation of the disturbance
    and `num_drift_steps` the length of the drift before the first frame.
    """

    states: np.ndarray
    actions: np.ndarray
    images: dict[str, np.ndarray]
    seed: int
    num_failed: int
    noise: float
    num_drift_steps: int


def demonstrate(scene: MetaWorldScene, settings: RecordSettings, episode: int) -> Demonstration:
    """Record one successful episode; a failed attempt is drawn again with the next seed.

    The result depends on the settings' seed, the task and `episode` alone.

    Raises:
        RuntimeError: the expert failed `MAX_ATTEMPTS` times.
    """
    for attempt in range(MAX_ATTEMPTS):
        rng = np.random.default_rng([settings.seed, *scene.task.encode(), episode, attempt])
        demonstration = _attempt(scene, settings, rng, attempt)
        if demonstration is not None:
            return demonstration
    raise RuntimeError(
        f"The expert of {scene.task} failed {MAX_ATTEMPTS} times in a row within {settings.max_episode_steps} steps. "
        "Give it more steps (max_episode_steps) or less noise (noise_levels)."
    )


def _attempt(
    scene: MetaWorldScene, settings: RecordSettings, rng: np.random.Generator, num_failed: int
) -> Demonstration | None:
    expert = scripted_expert(scene.task)
    seed = int(rng.integers(2**31))
    noise = float(rng.choice(settings.noise_levels))
    drifts = rng.random() < settings.drift_fraction
    num_drift_steps = int(rng.integers(5, settings.max_drift_steps + 1)) if drifts else 0
    observation = _drift(scene, scene.reset(seed), num_drift_steps, rng)
    shoves = _Shoves(settings.shove_probability if drifts else 0.0, settings.max_shove_steps, rng)
    states, actions, frames = [], [], []
    num_hold_steps_left = None
    for _ in range(settings.max_episode_steps):
        action = np.clip(expert.get_action(observation), -1.0, 1.0).astype(np.float32)
        states.append(robot_state(observation, settings.state))
        actions.append(action)
        frames.append(scene.render())
        disturbed = action.copy()
        disturbed[:3] += noise * rng.standard_normal(3, dtype=np.float32)
        observation, _, success = scene.step(np.clip(shoves.apply(disturbed), -1.0, 1.0))
        if success and num_hold_steps_left is None:
            num_hold_steps_left = settings.hold_steps
        if num_hold_steps_left is not None:
            if num_hold_steps_left == 0:
                break
            num_hold_steps_left -= 1
    if num_hold_steps_left is None:
        return None
    images = {camera: np.stack([frame[camera] for frame in frames]) for camera in scene.cameras}
    return Demonstration(np.stack(states), np.stack(actions), images, seed, num_failed, noise, num_drift_steps)


class _Shoves:
    """Now and then, some steps in a random direction instead of the action; the gripper's effort stays."""

    def __init__(self, probability: float, max_steps: int, rng: np.random.Generator) -> None:
        self._probability, self._max_steps, self._rng = probability, max_steps, rng
        self._num_steps_left = 0
        self._direction: np.ndarray = np.zeros(3, np.float32)

    def apply(self, action: np.ndarray) -> np.ndarray:
        """The action to execute in this step (4,)."""
        if self._probability == 0:  # draws nothing: recordings without shoves stay what they were
            return action
        if self._num_steps_left == 0 and self._rng.random() < self._probability:
            self._num_steps_left = int(self._rng.integers(1, self._max_steps + 1))
            self._direction = self._rng.uniform(-1.0, 1.0, 3).astype(np.float32)
        if self._num_steps_left == 0:
            return action
        self._num_steps_left -= 1
        return np.concatenate([self._direction, action[3:]])


def _drift(scene: MetaWorldScene, observation: np.ndarray, num_steps: int, rng: np.random.Generator) -> np.ndarray:
    direction = rng.uniform(-1.0, 1.0, ACTION_DIM).astype(np.float32)
    direction[3] = -1.0
    for _ in range(num_steps):
        observation, _, _ = scene.step(direction)
    return observation


@cache
def scripted_expert(task: str) -> Any:
    """MetaWorld's scripted policy of a task: ``get_action`` of the observation (39,) gives an action (4,)."""
    from metaworld.policies import ENV_POLICY_MAP

    experts: Mapping[str, Any] = ENV_POLICY_MAP
    return experts[task]()
