# SPDX-License-Identifier: Apache-2.0
"""Data sets made of a small recording, or beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from embodix.data.recorded_dataset import RecordedDataset
from embodix.testing.datasets import write_dataset
from embodix_metaworld.demonstrations import RecordSettings
from embodix_metaworld.recorder import record_metaworld


@pytest.fixture(scope="session")
def tokenizer_folder(recorded: RecordedDataset) -> Path:
    """The tokenizer built beside the recording."""
    return recorded.root / "tokenizer"


@pytest.fixture(scope="session")
def other_size_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One camera of 40 pixels."""
    root = tmp_path_factory.mktemp("large") / "large"
    return write_dataset(root, cameras=("front",), state_dim=3, action_dim=3, image_size=40, seed=2)


@pytest.fixture(scope="session")
def marked_dataset(tmp_path_factory: pytest.TempPathFactory, small_settings: Callable[..., RecordSettings]) -> Path:
    """A recording that marks absent cameras frame by frame."""
    root = tmp_path_factory.mktemp("marked") / "dataset"
    return record_metaworld(small_settings(root, episodes_per_task=3, image_size=28, missing_camera_fraction=0.5)).root
