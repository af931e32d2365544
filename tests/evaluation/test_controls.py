# SPDX-License-Identifier: Apache-2.0
"""Controls: what can be run on an evaluation, and the demonstration that the blind one replays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embodix.evaluation.controls import applicable_controls, mean_action_sequence
from embodix_metaworld.demonstrations import RecordSettings
from embodix_metaworld.recorder import record_metaworld

TASK = "drawer-close-v3"


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("blind") / "dataset"
    settings = RecordSettings(
        root=str(root), tasks=(TASK,), episodes_per_task=2, cameras=("front",), image_size=16,
        num_workers=1, drift_fraction=0.0, hold_steps=2, progress=False,
    )  # fmt: skip
    return record_metaworld(settings).root


def test_the_mean_demonstration_holds_last_actions(recording: Path) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("embodix/metaworld", root=recording)
    lasts = [dataset[int(end) - 1]["action"].numpy() for end in dataset.meta.episodes["dataset_to_index"]]
    actions = mean_action_sequence(recording, TASK, 150)
    assert actions.shape == (150, 4)
    np.testing.assert_allclose(actions[-1], np.mean(lasts, axis=0), atol=1e-6)


def test_a_task_without_demonstrations_is_an_error(recording: Path) -> None:
    with pytest.raises(ValueError, match="no demonstration of 'reach-v3'"):
        mean_action_sequence(recording, "reach-v3", 10)


def test_controls_are_those_that_tasks_and_recording_allow(recording: Path, tmp_path: Path) -> None:
    assert applicable_controls([TASK], recording) == ["blind", "blank_image"]
    assert applicable_controls([TASK, "reach-v3"], recording) == ["blank_image", "wrong_prompt"]
    assert applicable_controls([TASK], None) == ["blank_image"]
    assert applicable_controls([TASK], tmp_path) == ["blank_image"]
