# SPDX-License-Identifier: Apache-2.0
"""Sound data sets, and copies that can be damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from embodix.testing.damaged_datasets import Damage, write_sweeping


@pytest.fixture(scope="session")
def image_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three episodes of 24 frames, two tasks, two cameras stored as images."""
    return write_sweeping(tmp_path_factory.mktemp("sound") / "images")


@pytest.fixture(scope="session")
def video_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one camera stored as video, a file for each episode."""
    return write_sweeping(tmp_path_factory.mktemp("sound") / "videos", video=True, cameras=("front",), image_size=64)


@pytest.fixture
def damaged(tmp_path: Path, image_set: Path) -> Damage:
    shutil.copytree(image_set, tmp_path / "set")
    return Damage(tmp_path / "set")


@pytest.fixture
def damaged_video(tmp_path: Path, video_set: Path) -> Damage:
    shutil.copytree(video_set, tmp_path / "set")
    return Damage(tmp_path / "set")
