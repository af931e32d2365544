# SPDX-License-Identifier: Apache-2.0
"""RLinf's own Isaac Lab and ManiSkill environments as simulators of the evaluation engine.

RLinf (0.3.0, rlinf/envs) builds and steps them; here its observations get LeRobot's keys, and one environment is run
at a time. Importing this module imports neither RLinf nor a simulator.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

from embodix.contracts import StepOutcome
from embodix_rlinf_sims import needs as rlinf_needs


@dataclass
class RlinfEnvConfig(EnvConfig, abc.ABC):
    """An environment of RLinf with LeRobot's features.

    `task` is the id of RLinf's environment and `episode_length` its `max_episode_steps`; `options` is the rest of
    RLinf's own configuration of the environment, as in its YAML files. `instruction` stands where the environment gives
    none. `cameras` names RLinf's image keys: a camera `x` becomes the policy's `observation.images.x`. The sizes are
    those of the environment; a wrong one is refused with the right one.
    """

    rlinf_type: ClassVar[str]

    fps: int = 20
    episode_length: int = 80
    instruction: str = ""
    cameras: dict[str, str] = field(default_factory=lambda: {"main_images": "main"})
    image_height: int = 480
    image_width: int = 640
    state_dim: int = 8
    action_dim: int = 7
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.features = {
            "action": PolicyFeature(FeatureType.ACTION, (self.action_dim,)),
            "agent_pos": PolicyFeature(FeatureType.STATE, (self.state_dim,)),
        }
        self.features_map = {"action": ACTION, "agent_pos": OBS_STATE}
        for camera in self.cameras.values():
            shape = (self.image_height, self.image_width, 3)
            self.features[f"pixels/{camera}"] = PolicyFeature(FeatureType.VISUAL, shape)
            self.features_map[f"pixels/{camera}"] = f"{OBS_IMAGES}.{camera}"

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        """LeRobot's `make_env` can't build it.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{self.task} is RLinf's environment and runs in `lerobot eval` only.")

    @abc.abstractmethod
    def require_runnable(self) -> None:
        """Raise ValueError with the reasons where the simulator can't run."""

    def rlinf_config(self) -> dict[str, Any]:
        """RLinf's configuration of one environment that ends with its episode."""
        init_params = {**self.options.get("init_params", {}), "id": self.task}
        return {
            **self.options,
            "env_type": self.rlinf_type,
            "auto_reset": False,
            "ignore_terminations": False,
            "use_fixed_reset_state_ids": False,
            "group_size": 1,
            "max_episode_steps": self.episode_length,
            "init_params": {**init_params, "max_episode_steps": self.episode_length},
        }

    def simulators(self) -> RlinfSimulators:
        """The one task.

        Raises:
            ValueError: no task, or a simulator that can't run here, with every reason.
        """
        if not self.task:
            raise ValueError(f"env.task must be the id of an environment of RLinf's {self.rlinf_type}; got none.")
        self.require_runnable()
        return RlinfSimulators(self, (self.task,))


@EnvConfig.register_subclass("embodix_maniskill")
@dataclass
class RlinfManiskillConfig(RlinfEnvConfig):
    """ManiSkill by RLinf's ``ManiskillEnv``."""

    rlinf_type: ClassVar[str] = "maniskill"

    def require_runnable(self) -> None:
        backend = str(self.options.get("init_params", {}).get("sim_backend", "gpu"))
        rlinf_needs.require("ManiSkill", lambda: rlinf_needs.maniskill_lacks(backend))


@EnvConfig.register_subclass("embodix_isaaclab")
@dataclass
class RlinfIsaaclabConfig(RlinfEnvConfig):
    """Isaac Lab by RLinf's registered tasks."""

    rlinf_type: ClassVar[str] = "isaaclab"

    def rlinf_config(self) -> dict[str, Any]:
        config = super().rlinf_config()
        config["init_params"]["task_description"] = self.instruction
        return config

    def require_runnable(self) -> None:
        rlinf_needs.require("Isaac Lab", rlinf_needs.isaaclab_lacks)


@dataclass(frozen=True)
class RlinfSimulators:
    """One task of one of RLinf's environments."""

    env_cfg: RlinfEnvConfig
    tasks: tuple[str, ...]

    def build(self, task: str) -> RlinfSimulator:
        """Start RLinf's environment."""
        from omegaconf import OmegaConf
        from rlinf.envs import get_env_cls

        config = OmegaConf.create(self.env_cfg.rlinf_config())
        env_class = get_env_cls(self.env_cfg.rlinf_type, config)
        env = env_class(config, num_envs=1, seed_offset=0, total_num_processes=1, worker_info=None)
        return RlinfSimulator(env, self.env_cfg)


class RlinfSimulator:
    """One environment of RLinf, which is a batch of one on the simulator's device.

    It renders in every step, since RLinf's environments do.
    """

    def __init__(self, env: Any, config: RlinfEnvConfig) -> None:
        self._env, self._config = env, config
        self.max_steps, self.fps = config.episode_length, config.fps
        self.instruction = config.instruction
        self._observation: dict[str, Any] = {}

    def reset(self, seed: int) -> None:
        """Start the episode of a seed."""
        import torch

        self._env.seed = seed  # ManiskillEnv.reset takes its own seed and not the argument
        with torch.random.fork_rng():  # its put-on-plate tasks draw their scene from torch's global stream
            torch.manual_seed(seed)
            observation, _ = self._env.reset(seed=seed)
        self._take(observation)
        said = observation.get("task_descriptions")
        self.instruction = str(said[0]) if said else self._config.instruction

    def observe(self) -> dict[str, Any]:
        """``pixels`` (uint8 (H, W, 3) for each camera) and ``agent_pos`` (float32 (state_dim,))."""
        return {"pixels": dict(self._observation["pixels"]), "agent_pos": self._observation["agent_pos"]}

    def step(self, action: np.ndarray) -> StepOutcome:
        """Apply one action (action_dim,)."""
        import torch

        actions_BA = torch.as_tensor(action, dtype=torch.float32, device=self._env.device)[None]
        observation, reward, terminated, truncated, infos = self._env.step(actions_BA, auto_reset=False)
        self._take(observation)
        success = infos["episode"].get("success_once")
        if success is None:
            raise ValueError(f"{self._config.task} does not tell success, so it can't be evaluated.")
        return StepOutcome(float(reward[0]), bool(success[0]), bool(terminated[0]) or bool(truncated[0]))

    def frame(self) -> np.ndarray:
        """The first camera."""
        first: np.ndarray = next(iter(self._observation["pixels"].values()))
        return first

    def close(self) -> None:
        """Close the simulator; RLinf's ManiSkill environment has no method of its own for it."""
        self._env.env.close()

    def _take(self, observation: Mapping[str, Any]) -> None:
        config = self._config
        pixels = {name: self._image(observation, key) for key, name in config.cameras.items()}
        state = _first(observation["states"]).astype(np.float32)
        if state.shape != (config.state_dim,):
            raise ValueError(f"{config.task} has a state of shape {state.shape}; set env.state_dim={state.size}.")
        self._observation = {"pixels": pixels, "agent_pos": state}

    def _image(self, observation: Mapping[str, Any], key: str) -> np.ndarray:
        if observation.get(key) is None:
            shown = [name for name, value in observation.items() if "images" in name and value is not None]
            raise ValueError(f"{self._config.task} shows {', '.join(shown)}, not {key!r}; change env.cameras.")
        image = _first(observation[key])
        wanted = (self._config.image_height, self._config.image_width, 3)
        if image.shape != wanted or image.dtype != np.uint8:
            raise ValueError(
                f"{self._config.task} gives {key} as {image.dtype} {image.shape}, and uint8 {wanted} is configured; "
                "set env.image_height and env.image_width."
            )
        return image


def _first(batch: Any) -> np.ndarray:
    """The only row of a batch, on the CPU."""
    row = batch[0]
    return row.detach().cpu().numpy() if hasattr(row, "detach") else np.asarray(row)
