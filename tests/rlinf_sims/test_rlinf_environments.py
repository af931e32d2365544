# SPDX-License-Identifier: Apache-2.0
"""RLinf's GPU environments: their configuration, why they are refused, and what LeRobot gets of them.

The environment that is stepped here has the interface of RLinf 0.3.0's (rlinf/envs/maniskill/maniskill_env.py and
rlinf/envs/isaaclab/isaaclab_env.py) and no physics: theirs needs a GPU.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from embodix.config.compose import compose
from embodix.evaluation.actors import ReplayActor
from embodix.evaluation.engine import EngineSettings, run_episodes
from embodix.evaluation.episodes import Episode
from embodix.training.host_config import decode_env
from embodix_rlinf_sims import environment as rlinf_sims
from embodix_rlinf_sims.environment import RlinfEnvConfig, RlinfIsaaclabConfig, RlinfManiskillConfig

HEIGHT, WIDTH = 12, 16


class BatchOfOne:
    """Succeeds in the third step with an action above zero; its first state is drawn as RLinf's scenes are."""

    def __init__(self, cfg: Any, num_envs: int, seed_offset: int, total_num_processes: int, worker_info: Any) -> None:
        assert (num_envs, seed_offset, total_num_processes, worker_info) == (1, 0, 1, None)
        assert not cfg.auto_reset
        assert not cfg.ignore_terminations
        self.cfg, self.seed, self.device = cfg, cfg.seed, torch.device("cpu")
        self.closed: list[bool] = []
        self.env = SimpleNamespace(close=lambda: self.closed.append(True))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        """As ``ManiskillEnv.reset``: its own seed and not the argument; the scene comes from the global stream."""
        self.start = torch.randint(1000, (1,)).item() + self.seed
        self.num_steps, self.num_pushed = 0, 0
        return self.observation(), {}

    def step(self, actions: torch.Tensor, auto_reset: bool = True) -> tuple:
        assert actions.shape == (1, 7)
        assert not auto_reset
        self.num_steps += 1
        self.num_pushed += int(actions[0, 0] > 0)
        success = torch.tensor([self.num_pushed >= 3])
        infos = {"episode": {"success_once": success, "return": torch.tensor([float(self.num_pushed)])}}
        ended = torch.tensor([self.num_steps >= self.cfg.max_episode_steps])
        return self.observation(), success.float(), success, ended, infos

    def observation(self) -> dict[str, Any]:
        image = torch.full((1, HEIGHT, WIDTH, 3), self.num_steps, dtype=torch.uint8)
        return {
            "main_images": image,
            "wrist_images": image + 100,
            "extra_view_images": None,
            "states": torch.full((1, 8), float(self.start)),
            "task_descriptions": [f"put it there {self.start}"],
        }


@pytest.fixture
def rlinf(monkeypatch: pytest.MonkeyPatch) -> None:
    """RLinf's ``get_env_cls``, and a machine that lacks nothing."""
    envs = ModuleType("rlinf.envs")
    envs.get_env_cls = lambda env_type, cfg: BatchOfOne  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rlinf", ModuleType("rlinf"))
    monkeypatch.setitem(sys.modules, "rlinf.envs", envs)
    monkeypatch.setattr(rlinf_sims, "maniskill_lacks", lambda backend: [])
    monkeypatch.setattr(rlinf_sims, "isaaclab_lacks", list)


def config(**changes: Any) -> RlinfManiskillConfig:
    cameras = {"main_images": "main", "wrist_images": "wrist"}
    fields = {"task": "PutOnPlate", "image_height": HEIGHT, "image_width": WIDTH, "episode_length": 5}
    return RlinfManiskillConfig(**{**fields, "cameras": cameras, "options": {"seed": 0}, **changes})


def group(name: str) -> RlinfEnvConfig:
    node: Any = OmegaConf.to_container(compose("eval", [f"env={name}"]).env, resolve=True)
    env = decode_env(node)
    assert isinstance(env, RlinfEnvConfig)
    return env


def test_the_groups_hold_rlinfs_own_keys() -> None:
    maniskill, isaaclab = group("maniskill").rlinf_config(), group("isaaclab").rlinf_config()
    assert maniskill["env_type"] == "maniskill"
    assert maniskill["init_params"]["id"] == "PutOnPlateInScene25Main-v3"
    assert maniskill["init_params"]["max_episode_steps"] == maniskill["max_episode_steps"] == 80
    assert isaaclab["init_params"]["task_description"].startswith("Pick up the red cube and place")
    assert isaaclab["init_params"]["wrist_cam"] == {"height": 84, "width": 84}
    # what RLinf's constructors read without a default
    for key in ("seed", "auto_reset", "use_rel_reward", "ignore_terminations", "video_cfg", "group_size"):
        assert key in maniskill
        assert key in isaaclab


def test_features_have_lerobots_keys() -> None:
    env = config()
    assert set(env.features_map.values()) == {
        "action", "observation.state", "observation.images.main", "observation.images.wrist",
    }  # fmt: skip
    assert env.features["pixels/main"].shape == (HEIGHT, WIDTH, 3)
    with pytest.raises(ValueError, match="runs in `lerobot eval` only"):
        _ = env.gym_kwargs


def test_what_lerobot_gets(rlinf: None) -> None:
    simulator = config().simulators().build("PutOnPlate")
    simulator.reset(7)
    observation = simulator.observe()
    assert observation["pixels"]["wrist"].shape == (HEIGHT, WIDTH, 3)
    assert observation["pixels"]["wrist"].max() == 100
    assert (observation["agent_pos"].dtype, observation["agent_pos"].shape) == (np.float32, (8,))
    assert simulator.instruction == f"put it there {int(observation['agent_pos'][0])}"
    outcome = simulator.step(np.ones(7))
    assert (outcome.reward, outcome.success, outcome.done) == (0.0, False, False)
    assert simulator.frame().max() == 1
    simulator.close()


def test_the_seed_decides_the_scene_and_leaves_the_global_stream_alone(rlinf: None) -> None:
    simulator = config().simulators().build("PutOnPlate")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    scenes = []
    for seed in (7, 8, 7):
        simulator.reset(seed)
        scenes.append(simulator.observe()["agent_pos"][0])
    assert scenes[0] == scenes[2] != scenes[1]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_engine_runs_it(rlinf: None) -> None:
    episodes = [Episode("PutOnPlate", seed) for seed in range(3)]
    push, rest = np.ones((1, 7), np.float32), np.zeros((1, 7), np.float32)
    for actions, solved, num_steps in ((push, True, 3), (rest, False, 5)):
        actor = ReplayActor({"PutOnPlate": actions})
        results = run_episodes(config().simulators(), actor, episodes, EngineSettings(num_slots=2))
        assert [(result.success, result.num_steps) for result in results] == [(solved, num_steps)] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_dim": 9}, r"state of shape \(8,\); set env.state_dim=8"),
        ({"cameras": {"left_images": "left"}}, "shows main_images, wrist_images, not 'left_images'"),
        ({"cameras": {"extra_view_images": "extra"}}, "not 'extra_view_images'"),
        ({"image_height": 13}, r"gives main_images as uint8 \(12, 16, 3\), and uint8 \(13, 16, 3\) is configured"),
    ],
)
def test_sizes_that_differ_are_refused_with_the_right_ones(rlinf: None, changes: dict, message: str) -> None:
    simulator = config(**changes).simulators().build("PutOnPlate")
    with pytest.raises(ValueError, match=message):
        simulator.reset(0)


def test_every_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rlinf_sims, "version_problem", lambda name, wanted: f"wanted {name}{wanted}, found none")
    monkeypatch.setattr(rlinf_sims, "probe", lambda script: "RuntimeError: nothing here")
    installed = {"sapien"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace() if name in installed else None)
    with pytest.raises(ValueError, match="ManiSkill can't run here") as refused:
        RlinfManiskillConfig(task="PickCube-v1").simulators()
    for reason in (
        "wanted rlinf>=0.3.0,<0.4, found none",
        "mani_skill is not installed (pip install mani-skill)",
        "CUDA does not work: RuntimeError: nothing here",
        "Vulkan rendering by SAPIEN does not work: RuntimeError: nothing here",
    ):
        assert reason in str(refused.value)
    assert not any("CUDA" in reason for reason in rlinf_sims.maniskill_lacks("physx_cpu"))
    with pytest.raises(
        ValueError, match=r"Isaac Lab can't run here: .*isaaclab is not installed.*isaacsim.*CUDA does not work"
    ):
        RlinfIsaaclabConfig(task="Isaac-Stack").simulators()
    installed |= {"mani_skill", "isaaclab", "isaacsim"}
    monkeypatch.setattr(rlinf_sims, "version_problem", lambda name, wanted: None)
    monkeypatch.setattr(rlinf_sims, "probe", lambda script: None)
    assert rlinf_sims.maniskill_lacks("gpu") == rlinf_sims.isaaclab_lacks() == []
    with pytest.raises(ValueError, match=r"env\.task must be the id"):
        RlinfIsaaclabConfig().simulators()


def test_a_probe_reports_what_it_met() -> None:
    assert rlinf_sims.probe("pass") is None
    assert rlinf_sims.probe("raise RuntimeError('failed to find a rendering device')") == (
        "RuntimeError: failed to find a rendering device"
    )
    assert (rlinf_sims.probe(rlinf_sims._USE_CUDA) is None) == torch.cuda.is_available()
