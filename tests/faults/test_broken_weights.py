# SPDX-License-Identifier: Apache-2.0
"""Weights that do not fit are an error that lists the tensors, never a run from random weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from embodix.testing.host_runs import train_here
from embodix_pi05.testing import small_run

LOST = "model.action_in_proj.weight"


@pytest.fixture(scope="module")
def trained(demonstrations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder of a checkpoint."""
    run = tmp_path_factory.mktemp("trained") / "run"
    train_here(small_run(demonstrations, "train.steps=1", f"train.output_dir={run}"))
    return run / "checkpoints" / "last" / "pretrained_model"


@pytest.fixture
def start_from(demonstrations: Path, tmp_path: Path, trained: Path) -> Callable[[Callable[[Path], None]], None]:
    """Start a run from a copy of the checkpoint that ``damage`` has been at."""

    def start(damage: Callable[[Path], None]) -> None:
        model = shutil.copytree(trained, tmp_path / "model")
        damage(model / "model.safetensors")
        options = ["train.steps=1", f"policy.pretrained_path={model}", f"train.output_dir={tmp_path}/run"]
        train_here(small_run(demonstrations, *options))

    return start


def _rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_whole_weights_are_taken(start_from: Callable, tmp_path: Path, trained: Path) -> None:
    start_from(lambda path: None)
    before = load_file(trained / "model.safetensors")[LOST]
    after = load_file(tmp_path / "run" / "checkpoints" / "last" / "pretrained_model" / "model.safetensors")[LOST]
    torch.testing.assert_close(after, before, rtol=0, atol=2e-3)  # one step of AdamW at a rate of 1e-3 away


def test_truncated_file(start_from: Callable) -> None:
    def truncate(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    with pytest.raises(ValueError, match=r"model\.safetensors is cut off in tensor model\..*: \d+ bytes of tensors"):
        start_from(truncate)


def test_missing_tensor_is_listed(start_from: Callable) -> None:
    with pytest.raises(ValueError, match=rf"does not fit this π0\.5(?s:.*)missing \(1\):\n +{LOST}"):
        start_from(lambda path: _rewrite(path, lambda tensors: tensors.pop(LOST)))


def test_tensor_of_another_shape_is_listed(start_from: Callable) -> None:
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors[LOST] = torch.cat([tensors[LOST], tensors[LOST]])

    with pytest.raises(ValueError, match=rf"other size \(1\):\n +{LOST}: checkpoint \(48, 32\), policy \(24, 32\)"):
        start_from(lambda path: _rewrite(path, widen))


def test_unexpected_tensor_is_listed(start_from: Callable) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.extra.weight"] = torch.zeros(2)

    with pytest.raises(ValueError, match=r"unexpected \(1\):\n +model\.extra\.weight"):
        start_from(lambda path: _rewrite(path, add))


def test_missing_file(start_from: Callable) -> None:
    with pytest.raises(ValueError, match=r"No weights were loaded from"):
        start_from(Path.unlink)
