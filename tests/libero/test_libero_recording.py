# SPDX-License-Identifier: Apache-2.0
"""Recording LIBERO: what a policy sees in the data is what it sees in evaluation."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from embodix.data.recorded_dataset import read_manifest
from embodix_libero.recorder import LiberoRecordSettings, policy_observation, record_libero
from embodix_libero.setup import inspect_libero

PROBLEM = inspect_libero().problem


def test_images_are_turned_upright_and_the_state_is_position_rotation_and_fingers():
    rng = np.random.default_rng(0)
    images = {name: rng.integers(0, 256, (8, 8, 3), dtype=np.uint8) for name in ("image", "image2")}
    half_turn_about_z = np.array([0.0, 0.0, 1.0, 0.0])
    robot_state = {
        "eef": {"pos": np.array([0.1, 0.2, 0.3]), "quat": half_turn_about_z, "mat": np.eye(3)},
        "gripper": {"qpos": np.array([0.04, -0.04]), "qvel": np.zeros(2)},
        "joints": {"pos": np.zeros(7), "vel": np.zeros(7)},
    }
    seen = policy_observation({"pixels": images, "robot_state": robot_state})
    assert set(seen) == {"observation.images.image", "observation.images.image2", "observation.state"}
    for name, image in images.items():
        np.testing.assert_array_equal(seen[f"observation.images.{name}"], image[::-1, ::-1])
    np.testing.assert_allclose(seen["observation.state"], [0.1, 0.2, 0.3, 0.0, 0.0, np.pi, 0.04, -0.04], rtol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"task_ids": []}, "different numbers of tasks"),
        ({"task_ids": [1, 1]}, "different numbers of tasks"),
        ({"rendering": "cheap"}, "upstream"),
        ({"storage": "film"}, "image"),
        ({"episodes_per_task": 0}, "at least 1"),
        ({"noise": -0.1}, "at least 0"),
    ],
)
def test_wrong_settings_name_the_right_ones(wrong, message):
    with pytest.raises(ValueError, match=message):
        LiberoRecordSettings("data", **wrong)


def test_rendering_decides_the_content_and_progress_does_not():
    settings = LiberoRecordSettings("data").dataset_settings()
    assert settings["rendering"] == "upstream"
    assert "root" not in settings and "progress" not in settings


@pytest.mark.slow
@pytest.mark.skipif(PROBLEM is not None, reason=f"LIBERO is not set up: {PROBLEM}; run `make libero`")
def test_a_demonstration_is_recorded_once_and_reused(tmp_path):
    changes = {"image_size": 32, "task_ids": [2], "episodes_per_task": 1, "rendering": "fast"}
    overrides = [f"{name}={value}" for name, value in changes.items()]
    command = [sys.executable, "-m", "embodix", "data", "libero", f"root={tmp_path / 'demo'}", *overrides]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, check=True)
    assert record_libero(LiberoRecordSettings(str(tmp_path / "demo"), **changes)).reused
    (episode,) = read_manifest(tmp_path / "demo")["episodes"]
    assert episode["instruction"] == "pick up the black bowl from table center and place it on the plate"
    assert not (tmp_path / "demo.recording").exists()
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("embodix/libero", root=tmp_path / "demo")
    assert len(dataset) == episode["num_frames"]
    assert dataset[0]["observation.images.image"].std() > 0.05
    assert dataset[0]["action"].shape == (7,) and dataset[0]["observation.state"].shape == (8,)
