# SPDX-License-Identifier: Apache-2.0
"""The environment: honoured seeds, named cameras, instructions, and upstream's factory and vector environment."""

from __future__ import annotations

from dataclasses import dataclass

import draccus
import numpy as np
import pytest
from lerobot.envs.configs import EnvConfig
from lerobot.envs.factory import make_env
from lerobot.envs.utils import add_envs_task, close_envs, env_to_policy_features, preprocess_observation

from embodix_metaworld.environment import EmbodixMetaworldConfig, MetaWorldEnv
from embodix_metaworld.simulator import CAMERA_VIEWS, MetaWorldScene
from embodix_metaworld.tasks import INSTRUCTIONS

TASK = "button-press-topdown-v3"


@dataclass
class Holder:
    env: EnvConfig


@pytest.fixture
def env():
    env = MetaWorldEnv(TASK, image_size=32, episode_length=12)
    yield env
    env.close()


def assert_equal_observations(left, right):
    np.testing.assert_array_equal(left["agent_pos"], right["agent_pos"])
    for camera in left["pixels"]:
        np.testing.assert_array_equal(left["pixels"][camera], right["pixels"][camera])


@pytest.mark.parametrize("task", [TASK, "reach-v3", "door-open-v3"])
def test_the_same_seed_gives_the_same_goal_and_objects_whatever_came_before(task):
    fresh, used = (MetaWorldScene(task, ("front",), 32) for _ in range(2))
    used.reset(99)
    for _ in range(5):
        used.step(np.ones(4, np.float32))
    np.testing.assert_array_equal(fresh.reset(3), used.reset(3))
    np.testing.assert_array_equal(fresh.env._target_pos, used.env._target_pos)
    for _ in range(5):
        action = np.array([0.3, -0.5, 0.2, 1.0], np.float32)
        np.testing.assert_array_equal(fresh.step(action)[0], used.step(action)[0])
    np.testing.assert_array_equal(fresh.render()["front"], used.render()["front"])
    assert not np.array_equal(fresh.reset(3), fresh.reset(4))
    fresh.close()
    used.close()


def test_seeded_resets_give_seeded_observations(env):
    first, _ = env.reset(seed=5)
    other, _ = env.reset(seed=6)
    again, _ = env.reset(seed=5)
    assert_equal_observations(first, again)
    assert not np.array_equal(first["pixels"]["front"], other["pixels"]["front"])


def test_an_unseeded_reset_continues_the_seeds_stream(env):
    env.reset(seed=5)
    second, _ = env.reset()
    env.reset(seed=5)
    again, _ = env.reset()
    assert_equal_observations(second, again)


@pytest.mark.parametrize("camera", CAMERA_VIEWS)
def test_every_camera_sees_the_scene(camera):
    scene = MetaWorldScene(TASK, (camera,), 32)
    scene.reset(0)
    image = scene.render()[camera]
    scene.close()
    assert image.shape == (32, 32, 3)
    assert image.dtype == np.uint8
    assert image.std() > 5


def test_success_ends_the_episode_and_time_truncates_it(env):
    from metaworld.policies import ENV_POLICY_MAP

    expert = ENV_POLICY_MAP[TASK]()
    long_enough = MetaWorldEnv(TASK, image_size=32, episode_length=200, render_every=50)
    long_enough.reset(seed=1)
    terminated = truncated = False
    while not (terminated or truncated):
        raw = long_enough._simulator.scene.env._get_obs()
        _, _, terminated, truncated, info = long_enough.step(expert.get_action(raw))
    long_enough.close()
    assert (terminated, truncated, info["is_success"]) == (True, False, True)
    assert long_enough.seeded_episodes[0].success

    env.reset(seed=1)
    ends = [env.step(np.zeros(4, np.float32))[2:4] for _ in range(12)]
    assert ends == [(False, False)] * 11 + [(False, True)]
    assert [(e.seed, e.success, e.num_steps) for e in env.seeded_episodes] == [(1, False, 12)]


def test_frames_between_looks_are_repeated():
    env = MetaWorldEnv(TASK, image_size=32, render_every=3)
    observations = [env.reset(seed=0)[0]] + [env.step(np.ones(4, np.float32))[0] for _ in range(3)]
    env.close()
    fronts = [observation["pixels"]["front"] for observation in observations]
    np.testing.assert_array_equal(fronts[0], fronts[2])
    assert not np.array_equal(fronts[0], fronts[3])
    states = {observation["agent_pos"].tobytes() for observation in observations}
    assert len(states) == 4


def test_upstreams_factory_and_preprocessing_give_the_policys_keys_and_text():
    config = EmbodixMetaworldConfig(task=TASK, cameras=["front", "gripper", "topview"], image_size=32)
    envs = make_env(config, n_envs=2)
    vector_env = envs[config.type][0]
    observation, _ = vector_env.reset(seed=[1, 2])
    batch = add_envs_task(vector_env, preprocess_observation(observation))
    close_envs(envs)
    assert batch["task"] == [INSTRUCTIONS[TASK]] * 2
    assert batch["observation.state"].shape == (2, 4)
    for camera in config.cameras:
        assert batch[f"observation.images.{camera}"].shape == (2, 3, 32, 32)
    features = env_to_policy_features(config)
    assert features["observation.images.topview"].shape == (3, 32, 32)
    assert features["action"].shape == (4,)


def test_upstreams_factory_is_told_one_task():
    with pytest.raises(ValueError, match=r"with one task, got 2: reach-v3, push-v3. `lerobot eval` runs several"):
        make_env(EmbodixMetaworldConfig(task="reach-v3,push-v3"))


def test_draccus_knows_the_environment():
    decoded = draccus.decode(EnvConfig, {"type": "embodix_metaworld", "task": "reach-v3", "cameras": ["front"]})
    assert isinstance(decoded, EmbodixMetaworldConfig)
    assert (decoded.task, decoded.cameras) == ("reach-v3", ["front"])
    assert draccus.encode(Holder(decoded))["env"]["type"] == "embodix_metaworld"
    assert draccus.decode(Holder, draccus.encode(Holder(decoded))).env == decoded


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "press-everything", "instruction": "Press"}, "Tasks must be MetaWorld's, got 'press-everything'"),
        ({"task": "press-everything"}, "press-everything' has none"),
        ({"cameras": ["wrist"]}, r"got \['wrist'\]. Views:"),
        ({"cameras": []}, "different names of MetaWorld views"),
        ({"render_every": 0}, "at least 1 step"),
    ],
)
def test_mistakes_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        MetaWorldEnv(**{"task": TASK, **changes}).close()
