# SPDX-License-Identifier: Apache-2.0
"""MetaWorld as a LeRobot environment with several cameras, honoured seeds and the recorder's instructions.

The evaluation engine runs its simulators (`EmbodixMetaworldConfig.simulators`). It is also registered as
``env.type=embodix_metaworld``; upstream's own `make_env`, `eval_policy` and `eval_policy_all` run it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

from embodix.simulation.rendering import select_gl_backend
from embodix_metaworld.simulator import (
    ACTION_DIM,
    FPS,
    STATE_NAMES,
    MetaWorldSimulator,
    MetaWorldSimulators,
    check_cameras,
    check_state,
    view_of,
)
from embodix_metaworld.tasks import expand_tasks

GYM_ID = "embodix/MetaWorld-v3"


@dataclass(frozen=True)
class SeededEpisode:
    """Outcome of an episode that was started with a seed."""

    seed: int
    success: bool
    num_steps: int


class MetaWorldEnv(gym.Env):
    """One MetaWorld task.

    Observations are ``pixels`` (a uint8 image (image_size, image_size, 3) for each camera) and ``agent_pos``
    (float32, the components of `state`). An episode ends with its first success or after `episode_length` steps;
    `info["is_success"]` says which. `reset(seed=s)` gives the goal and objects of that seed; without a seed, the next
    ones of its stream.
    Images are rendered in every `render_every`-th step of an episode and repeated between: a policy that executes
    chunks of `render_every` actions looks only then, and rendering is most of a step's cost.
    `seeded_episodes` lists the outcomes of the episodes that had a seed, in the order in which they ended.

    Raises:
        ValueError: unknown task or camera, or a task without instruction.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": FPS}  # noqa: RUF012 (typed by gymnasium)
    render_mode = "rgb_array"

    def __init__(
        self,
        task: str,
        cameras: Sequence[str] = ("front", "gripper"),
        image_size: int = 56,
        episode_length: int = 150,
        instruction: str | None = None,
        render_every: int = 1,
        state: Sequence[str] = STATE_NAMES,
    ) -> None:
        if render_every < 1:
            raise ValueError(f"`render_every` must be at least 1 step, got {render_every}.")
        self.task = task
        view = view_of(cameras, image_size, state, episode_length)
        self._simulator = MetaWorldSimulator(task, view, instruction)
        self.task_description = self._simulator.instruction
        self._max_episode_steps = episode_length  # the name that lerobot_eval.rollout asks for
        image = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        self.observation_space = spaces.Dict(
            {
                "pixels": spaces.Dict(dict.fromkeys(cameras, image)),
                "agent_pos": spaces.Box(-np.inf, np.inf, (len(state),), np.float32),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (ACTION_DIM,), np.float32)
        self._render_every = render_every
        self._images: dict[str, np.ndarray] = {}
        self.seeded_episodes: list[SeededEpisode] = []
        self._seed: int | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode; the seed decides goal and objects."""
        super().reset(seed=seed)
        self._seed = seed
        self._simulator.reset(seed)
        return self._observe(), {"is_success": False}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Apply an action (4,), clipped to [-1, 1]."""
        outcome = self._simulator.step(action)
        truncated = outcome.done and not outcome.success
        if self._seed is not None and outcome.done:
            self.seeded_episodes.append(SeededEpisode(self._seed, outcome.success, self._simulator.num_steps))
            self._seed = None
        info = {"is_success": outcome.success, "task": self.task}
        return self._observe(), outcome.reward, outcome.success, truncated, info

    def render(self) -> np.ndarray:
        """The images of all cameras side by side, uint8 (image_size, num_cameras * image_size, 3)."""
        return np.concatenate(list(self._simulator.scene.render().values()), axis=1)

    def close(self) -> None:
        """Free the renderer."""
        self._simulator.close()

    def _observe(self) -> dict[str, Any]:
        if self._simulator.num_steps % self._render_every == 0:
            self._images = self._simulator.scene.render()
        return {"pixels": self._images, "agent_pos": self._simulator.robot_state()}


@EnvConfig.register_subclass("embodix_metaworld")
@dataclass
class EmbodixMetaworldConfig(EnvConfig):
    """LeRobot configuration of `MetaWorldEnv`: a camera `x` becomes the policy's `observation.images.x`."""

    task: str = "button-press-topdown-v3"
    fps: int = FPS
    cameras: list[str] = field(default_factory=lambda: ["front", "gripper"])
    image_size: int = 56
    episode_length: int = 150
    instruction: str | None = None
    render_every: int = 1
    state: list[str] = field(default_factory=lambda: list(STATE_NAMES))

    def __post_init__(self) -> None:
        check_cameras(self.cameras)
        check_state(self.state)
        self.features = {
            "action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,)),
            "agent_pos": PolicyFeature(FeatureType.STATE, (len(self.state),)),
        }
        self.features_map = {"action": ACTION, "agent_pos": OBS_STATE}
        for camera in self.cameras:
            shape = (self.image_size, self.image_size, 3)
            self.features[f"pixels/{camera}"] = PolicyFeature(FeatureType.VISUAL, shape)
            self.features_map[f"pixels/{camera}"] = f"{OBS_IMAGES}.{camera}"

    def simulators(self) -> MetaWorldSimulators:
        """The simulators of `task`: a task, a set of tasks such as MT10, or several with commas between.

        Raises:
            ValueError: an unknown task, or one `instruction` for several tasks.
            RuntimeError: no OpenGL backend renders on this machine.
        """
        tasks = expand_tasks(self.task)
        if self.instruction is not None and len(tasks) > 1:
            raise ValueError(f"`instruction` is of one task, and `task` names {len(tasks)}: {', '.join(tasks)}.")
        select_gl_backend()  # here, once: worker processes inherit it
        instructions = {} if self.instruction is None else {tasks[0]: self.instruction}
        view = view_of(self.cameras, self.image_size, self.state, self.episode_length)
        return MetaWorldSimulators(tasks, view, instructions, env_cfg=self)

    @property
    def type(self) -> str:
        # Not the registered name: make_env takes every type with "metaworld" in it for its own environment.
        return "embodix_meta_world"

    @property
    def package_name(self) -> str:
        return __name__

    @property
    def gym_id(self) -> str:
        return GYM_ID

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        tasks = expand_tasks(self.task)
        if len(tasks) > 1:
            raise ValueError(
                f"Upstream's evaluation runs this environment with one task, got {len(tasks)}: {', '.join(tasks)}. "
                "`lerobot eval` runs several."
            )
        return {
            "task": tasks[0],
            "cameras": list(self.cameras),
            "image_size": self.image_size,
            "episode_length": self.episode_length,
            "instruction": self.instruction,
            "render_every": self.render_every,
            "state": list(self.state),
        }


# Without gymnasium's wrappers: they hide `task_description` from add_envs_task (lerobot/envs/utils.py), and the
# policy would get an empty instruction.
gym.register(
    GYM_ID, entry_point="embodix_metaworld.environment:MetaWorldEnv", order_enforce=False, disable_env_checker=True
)
