# SPDX-License-Identifier: Apache-2.0
"""RLinf's own Isaac Lab and ManiSkill environments as simulators of the evaluation engine.

RLinf (0.3.0, rlinf/envs) builds and steps them; here its observations get LeRobot's keys, and one environment is run
at a time. What they need and lack on a machine is found by trying it in processes of their own. Importing this module
imports neither RLinf nor a simulator.
"""

from __future__ import annotations

import abc
import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

from embodix.config.compose import options_of
from embodix.contracts import StepOutcome
from embodix.patching import version_problem

RLINF_VERSIONS = ">=0.3.0,<0.4"
# RLinf puts actions and observations on the device of the simulator.
_USE_CUDA = "import torch; torch.zeros(1, device='cuda').add_(1).item()"
# SAPIEN, ManiSkill's engine, needs Vulkan even where nothing is looked at.
_RENDER_WITH_SAPIEN = """
import sapien
scene = sapien.Scene()
camera = scene.add_camera("probe", 16, 16, 1.0, 0.01, 10.0)
scene.set_ambient_light([1.0, 1.0, 1.0])
scene.update_render()
camera.take_picture()
if camera.get_picture("Color").shape[:2] != (16, 16):
    raise RuntimeError("the camera gave no picture")
"""


@dataclass
class RlinfEnvConfig(EnvConfig, abc.ABC):
    """An environment of RLinf with LeRobot's features.

    `task` is the id of RLinf's environment and `episode_length` its `max_episode_steps`; `options` is the rest of
    RLinf's own configuration of the environment, as in its YAML files. `instruction` stands where the environment gives
    none. `cameras` names RLinf's image keys: a camera `x` becomes the policy's `observation.images.x`. The sizes are
    those of the environment; a wrong one is refused with the right one.
    """

    rlinf_type: ClassVar[str]
    simulator_name: ClassVar[str]

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

    @staticmethod
    @abc.abstractmethod
    def problems(fields: Mapping[str, Any]) -> list[str]:
        """Why the simulator can't run here, one sentence a reason; none where it can."""

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
        reasons = self.problems(vars(self))
        if reasons:
            raise ValueError(
                f"{self.simulator_name} can't run here: {'; '.join(reasons)}. It needs an NVIDIA GPU with its driver; "
                f"choose another env: {', '.join(options_of('env'))}."
            )
        return RlinfSimulators(self, (self.task,))


@EnvConfig.register_subclass("embodix_maniskill")
@dataclass
class RlinfManiskillConfig(RlinfEnvConfig):
    """ManiSkill by RLinf's ``ManiskillEnv``."""

    rlinf_type: ClassVar[str] = "maniskill"
    simulator_name: ClassVar[str] = "ManiSkill"

    @staticmethod
    def problems(fields: Mapping[str, Any]) -> list[str]:
        init_params = (fields.get("options") or {}).get("init_params") or {}
        return maniskill_lacks(str(init_params.get("sim_backend") or "gpu"))


@EnvConfig.register_subclass("embodix_isaaclab")
@dataclass
class RlinfIsaaclabConfig(RlinfEnvConfig):
    """Isaac Lab by RLinf's registered tasks."""

    rlinf_type: ClassVar[str] = "isaaclab"
    simulator_name: ClassVar[str] = "Isaac Lab"

    def rlinf_config(self) -> dict[str, Any]:
        config = super().rlinf_config()
        config["init_params"]["task_description"] = self.instruction
        return config

    @staticmethod
    def problems(fields: Mapping[str, Any]) -> list[str]:
        return isaaclab_lacks()


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


def probe(script: str) -> str | None:
    """Run a script in a process of its own; None if it ended well, else the last line of its error."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"the probe ended with exit code {done.returncode}"


def maniskill_lacks(sim_backend: str) -> list[str]:
    """Why ManiSkill can't run here, one sentence a reason; none where it can.

    Args:
        sim_backend: of ManiSkill: ``gpu`` or ``cuda`` needs CUDA, ``cpu`` and ``physx_cpu`` do not.
    """
    lacks = _missing_packages({"mani_skill": "pip install mani-skill"})
    if "cpu" not in sim_backend:
        lacks += _failed({"CUDA": _USE_CUDA})
    if importlib.util.find_spec("sapien") is not None:
        lacks += _failed({"Vulkan rendering by SAPIEN": _RENDER_WITH_SAPIEN})
    return lacks


def isaaclab_lacks() -> list[str]:
    """Why Isaac Lab can't run here, one sentence a reason; none where it can."""
    packages = {
        "isaaclab": "install Isaac Lab by its own guide, in this environment",
        "isaacsim": "it comes with Isaac Lab",
    }
    return _missing_packages(packages) + _failed({"CUDA": _USE_CUDA})


def _missing_packages(packages: dict[str, str]) -> list[str]:
    problem = version_problem("rlinf", RLINF_VERSIONS)
    missing = [f"{name} is not installed ({hint})" for name, hint in packages.items() if not _is_installed(name)]
    return ([problem] if problem else []) + missing


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _failed(probes: dict[str, str]) -> list[str]:
    reasons = {what: probe(script) for what, script in probes.items()}
    return [f"{what} does not work: {reason}" for what, reason in reasons.items() if reason is not None]
