# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is found from any path into its run, and only a complete one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embodix.config.compose import merge_overrides
from embodix.training.checkpoint import find_checkpoint


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A Hydra folder with a run of two checkpoints and a last link, as upstream lays them out."""
    for step in (3, 6):
        folder = tmp_path / "run" / "checkpoints" / f"{step:06d}"
        (folder / "pretrained_model").mkdir(parents=True)
        (folder / "training_state").mkdir()
        (folder / "pretrained_model" / "train_config.json").write_text('{"policy": {"type": "pi05"}}')
        (folder / "pretrained_model" / "model.safetensors").touch()
        (folder / "training_state" / "training_step.json").write_text(json.dumps({"step": step}))
    (tmp_path / "run" / "checkpoints" / "last").symlink_to("000006")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("", 6),
        ("run", 6),
        ("run/checkpoints", 6),
        ("run/checkpoints/last", 6),
        ("run/checkpoints/000003", 3),
        ("run/checkpoints/000003/pretrained_model", 3),
        ("run/checkpoints/000003/pretrained_model/model.safetensors", 3),
        ("run/checkpoints/000003/training_state", 3),
        ("run/checkpoints/last/pretrained_model/train_config.json", 6),
    ],
)
def test_any_path_into_a_run_leads_to_its_checkpoint(run_folder: Path, path: str, step: int) -> None:
    found = find_checkpoint(run_folder / path)
    assert found.step == step
    assert found.folder == run_folder / "run" / "checkpoints" / f"{step:06d}", "the link is resolved"


def test_half_a_checkpoint_is_refused_with_what_was_tried(run_folder: Path) -> None:
    folder = run_folder / "run" / "checkpoints" / "000006"
    (folder / "training_state" / "training_step.json").unlink()
    (folder / "training_state").rmdir()
    with pytest.raises(ValueError, match=r"no complete checkpoint.*checkpoints/last link.*Looked in: .*000006"):
        find_checkpoint(folder)


def test_a_checkpoint_of_plain_upstream_has_no_overrides(run_folder: Path) -> None:
    checkpoint = find_checkpoint(run_folder)
    assert checkpoint.overrides() is None
    assert checkpoint.loader_state() is None


def test_added_overrides_replace_recorded_ones_of_the_same_key() -> None:
    recorded = ["policy=pi05_small", "+plugin=embodix", "train.steps=3"]
    assert merge_overrides(recorded, ["train.steps=6", "+plugin=none"]) == [
        "policy=pi05_small",
        "train.steps=6",
        "+plugin=none",
    ]
