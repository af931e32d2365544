# SPDX-License-Identifier: Apache-2.0
"""Demonstrations: what is executed against what is recorded, and scenes that show where things are."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest

from embodix_metaworld.demonstrations import demonstrate
from embodix_metaworld.simulator import MetaWorldScene


@pytest.fixture
def executed(monkeypatch):
    """The actions that scenes executed, in order."""
    actions = []
    step = MetaWorldScene.step
    monkeypatch.setattr(MetaWorldScene, "step", lambda self, action: actions.append(action) or step(self, action))
    return actions


def demonstration_of_reach(settings):
    scene = MetaWorldScene("reach-v3", settings.cameras, settings.image_size)
    try:
        return demonstrate(scene, settings, 0)
    finally:
        scene.close()


def test_a_shove_moves_the_hand_while_the_experts_wish_is_recorded(tmp_path, small_settings, executed):
    settings = small_settings(
        tmp_path, cameras=("front",), noise_levels=(0.0,), drift_fraction=1.0, shove_probability=0.1, max_shove_steps=4
    )
    wished = demonstration_of_reach(settings)
    done = np.stack(executed[-len(wished.actions) :])
    shoved = np.any(done != wished.actions, axis=1)
    assert 0 < shoved.sum() < len(shoved)
    np.testing.assert_array_equal(done[:, 3], wished.actions[:, 3])
    towards_goal = np.sum(done[shoved, :3] * wished.actions[shoved, :3], axis=1)
    assert np.any(towards_goal < 0), "a shove goes anywhere, against the expert too"


def test_episodes_without_a_drift_are_not_shoved(tmp_path, small_settings, executed):
    settings = small_settings(tmp_path, cameras=("front",), noise_levels=(0.0,), shove_probability=0.5)
    wished = demonstration_of_reach(settings)
    np.testing.assert_array_equal(executed[-len(wished.actions) :], wished.actions)


@pytest.mark.parametrize("task", ["reach-v3", "dial-turn-v3"])
def test_the_first_frame_and_observation_show_the_seeds_scene(task):
    scene = MetaWorldScene(task, ("front",), 56)
    try:
        observation, frame = scene.reset(3), scene.render()["front"]
        mujoco.mj_forward(scene.env.model, scene.env.data)
        np.testing.assert_array_equal(frame, scene.render()["front"])
        np.testing.assert_array_equal(observation, scene.env._get_obs())
        np.testing.assert_array_equal(observation[:18], observation[18:36])
        scene.env.seed(3)
        scene.env.reset()
        assert not np.array_equal(frame, scene.render()["front"]), "MetaWorld's own reset shows an earlier draw"
    finally:
        scene.close()
