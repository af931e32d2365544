# SPDX-License-Identifier: Apache-2.0
"""A checkpoint with a file that is gone or cut off is refused by that file's name, before anything is built."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from embodix.testing.host_runs import train_here
from embodix.training.checkpoint import find_checkpoint
from embodix_pi05.testing import small_run

FILES = (
    "training_state/optimizer_state.safetensors",
    "training_state/optimizer_param_groups.json",
    "training_state/scheduler_state.json",
    "training_state/training_step.json",
    "training_state/rng_state.safetensors",
    "training_state/embodix_loader.safetensors",
    "training_state/embodix_identity.json",
    "pretrained_model/config.json",
    "pretrained_model/model.safetensors",
    "pretrained_model/policy_preprocessor.json",
    "pretrained_model/policy_preprocessor_step_3_normalizer_processor.safetensors",
)
OF_EMBODIX = ("embodix_loader.safetensors", "embodix_identity.json")


@pytest.fixture(scope="module")
def trained(blobs: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    options = ("train.steps=2", "train.save_freq=1", f"train.output_dir={folder}")
    train_here(small_run(blobs, f"tokenizer.directory={tokenizer}", *options))
    return folder


@pytest.fixture
def checkpoint(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run", symlinks=True) / "checkpoints" / "000002"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_a_file_that_is_cut_off_is_named(checkpoint: Path, name: str, keep: float) -> None:
    path = checkpoint / name
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    with pytest.raises(ValueError, match=rf"{path} is cut off or damaged .*resume={checkpoint.parent}/000001\."):
        find_checkpoint(checkpoint).resumption([])


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith((*OF_EMBODIX, "model.safetensors"))])
def test_a_file_that_is_gone_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    with pytest.raises(ValueError, match=rf"{checkpoint / name} is missing\. A run is resumed with everything"):
        find_checkpoint(checkpoint).resumption([])


@pytest.mark.parametrize(
    ("name", "content"), [("embodix_stream.json", b"{}"), ("embodix_loader.safetensors", b"\x02" + bytes(7) + b"{}")]
)
def test_a_position_that_says_something_else_is_named(checkpoint: Path, name: str, content: bytes) -> None:
    (checkpoint / "training_state" / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"position in the data that {checkpoint}/training_state holds can't be read"):
        find_checkpoint(checkpoint).resumption([])


def test_the_first_checkpoint_names_no_earlier_one(checkpoint: Path) -> None:
    first = checkpoint.with_name("000001")
    (first / "training_state" / "rng_state.safetensors").unlink()
    with pytest.raises(ValueError, match=r"Copy the checkpoint again, or start another run\."):
        find_checkpoint(first).resumption([])


def test_a_command_says_it_before_it_builds(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkpoint / FILES[0]).unlink()
    forbidden: Callable[..., None] = lambda *_: pytest.fail("the run began")  # noqa: E731
    monkeypatch.setattr("embodix.training.run._train", forbidden)
    with pytest.raises(ValueError, match=r"optimizer_state.safetensors is missing"):
        train_here([f"resume={checkpoint}"])
