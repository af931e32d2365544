# SPDX-License-Identifier: Apache-2.0
"""Small runs on made-up data sets, in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from embodix.data.tokenizer import build_tokenizer
from embodix.testing.datasets import write_dataset
from embodix.testing.host_runs import VOCAB_SIZE
from embodix_pi05.testing import small_run

TASKS = ("push the button", "open the drawer slowly")
Overrides = Callable[..., list[str]]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer for what the tasks say."""
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(TASKS, folder, vocab_size=VOCAB_SIZE)
    return folder


@pytest.fixture(scope="session")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two episodes of twelve frames with one camera, as images."""
    return write_dataset(tmp_path_factory.mktemp("blobs") / "blobs", cameras=("front",), tasks=TASKS)


@pytest.fixture(scope="session")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as one video."""
    return write_dataset(tmp_path_factory.mktemp("videos") / "videos", cameras=("front",), tasks=TASKS, video=True)


@pytest.fixture
def run_of(tokenizer: Path, tmp_path: Path) -> Overrides:
    """Overrides of a small run on a data set, in the folder ``run`` of the test."""

    def overrides(root: Path, *more: str) -> list[str]:
        return small_run(root, f"tokenizer.directory={tokenizer}", f"train.output_dir={tmp_path}/run", *more)

    return overrides
