# SPDX-License-Identifier: Apache-2.0
"""A resumed run is the uninterrupted one, to the last bit."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from embodix.report.steps import read_steps
from embodix.testing.host_runs import train_here, train_upstream
from embodix.training.checkpoint import find_checkpoint
from embodix_pi05.testing import small_run

Weights = dict[str, torch.Tensor]
NUM_STEPS = 6
# One episode of 50 to 60 frames in batches of 16: an epoch is 4 batches, so it ends between steps 4 and 5.
SHORT_EPOCH = [
    "dataset.episodes=[0]",
    "train.batch_size=16",
    "train.num_workers=2",
    "train.save_freq=1",
    "policy.chunk_size=2",
    "policy.n_action_steps=1",
]


@pytest.fixture(scope="module")
def whole_run_of(demonstrations: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """An uninterrupted run of a plugin with a checkpoint at every step."""

    @functools.cache
    def train(plugin: str) -> Path:
        folder = tmp_path_factory.mktemp(f"whole_{plugin}") / "run"
        options = [f"train.steps={NUM_STEPS}", f"train.output_dir={folder}", f"+plugin={plugin}"]
        train_here(small_run(demonstrations, *SHORT_EPOCH, *options))
        return folder

    return train


@pytest.fixture
def whole_run(whole_run_of: Callable[[str], Path]) -> Path:
    return whole_run_of("embodix")


def _interrupted(whole: Path, folder: Path, step: int) -> Path:
    """A copy of the run as it stood after ``step``."""
    shutil.copytree(whole, folder, symlinks=True)
    for later in range(step + 1, NUM_STEPS + 1):
        shutil.rmtree(folder / "checkpoints" / f"{later:06d}")
    last = folder / "checkpoints" / "last"
    last.unlink()
    last.symlink_to(f"{step:06d}")
    steps = (folder / "steps.jsonl").read_text().splitlines(keepends=True)
    (folder / "steps.jsonl").write_text("".join(steps[:step]))
    return folder


def _assert_same_run(resumed: Path, whole: Path, weights_of: Callable[[Path], Weights]) -> None:
    ours, theirs = read_steps(resumed / "steps.jsonl"), read_steps(whole / "steps.jsonl")
    for field in ("step", "loss", "grad_norm", "lr"):
        assert [getattr(record, field) for record in ours] == [getattr(record, field) for record in theirs], field
    resumed_weights, whole_weights = weights_of(resumed), weights_of(whole)
    assert resumed_weights.keys() == whole_weights.keys()
    assert [name for name in whole_weights if not torch.equal(resumed_weights[name], whole_weights[name])] == []
    state = Path("checkpoints/last/training_state")
    for name in ("optimizer_state.safetensors", "rng_state.safetensors", "embodix_loader.safetensors"):
        assert (resumed / state / name).read_bytes() == (whole / state / name).read_bytes(), name


@pytest.mark.parametrize("plugin", ["none", "embodix"])
@pytest.mark.parametrize("step", [3, 4], ids=["within_an_epoch", "at_the_end_of_an_epoch"])
def test_resuming_equals_not_stopping(
    whole_run_of: Callable[[str], Path], tmp_path: Path, step: int, plugin: str, weights_of: Callable[[Path], Weights]
) -> None:
    whole_run = whole_run_of(plugin)
    run = _interrupted(whole_run, tmp_path / "run", step)
    result = train_here([f"resume={run}"])
    assert result.output_dir == run
    assert [record.step for record in result.records] == list(range(step + 1, NUM_STEPS + 1))
    _assert_same_run(run, whole_run, weights_of)


def test_the_data_position_matters(whole_run: Path, tmp_path: Path) -> None:
    """Without the loader's state the resumed run sees other samples: what upstream alone would do."""
    run = _interrupted(whole_run, tmp_path / "run", 3)
    for state in run.glob("checkpoints/*/training_state/embodix_loader.safetensors"):
        state.unlink()
    with pytest.raises(
        ValueError, match=r"no position in these batches \(its file is gone\).*accept_changes=\[position"
    ):
        train_here([f"resume={run}"])
    train_here([f"resume={run}", "accept_changes=[position]"])
    ours, theirs = read_steps(run / "steps.jsonl"), read_steps(whole_run / "steps.jsonl")
    assert [record.loss for record in ours[3:]] != [record.loss for record in theirs[3:]]


@pytest.mark.parametrize(
    "place",
    [
        "checkpoints/000003/pretrained_model/train_config.json",
        "checkpoints/000003/pretrained_model/model.safetensors",
        "checkpoints/000003/pretrained_model",
        "checkpoints/000003/training_state",
        "checkpoints/000003",
        "checkpoints/last",
        "checkpoints",
        ".",
    ],
)
def test_a_checkpoint_is_found_from_any_of_its_places(whole_run: Path, place: str) -> None:
    step = 6 if place in ("checkpoints/last", "checkpoints", ".") else 3
    assert find_checkpoint(whole_run / place).step == step


def test_the_hydra_folder_of_a_run_is_accepted(whole_run: Path) -> None:
    assert find_checkpoint(whole_run.parent).step == NUM_STEPS


def test_nothing_to_resume_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no complete checkpoint.*Looked in: .*checkpoints/last"):
        train_here([f"resume={tmp_path}"])


def test_a_resumed_run_may_go_further(whole_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole_run, tmp_path / "run", symlinks=True)
    result = train_here([f"resume={run}/checkpoints/last", "train.steps=8", "schedule.on_resume=one_run"])
    assert [record.step for record in result.records] == [7, 8]
    assert [record.step for record in read_steps(run / "steps.jsonl")] == list(range(1, 9))
    assert find_checkpoint(run).step == 8
    assert json.loads(find_checkpoint(run).config_path.read_text())["steps"] == 8


def test_a_checkpoint_of_another_policy_is_refused(whole_run: Path) -> None:
    with pytest.raises(ValueError, match=r"holds a policy of type 'pi05', but this command asks for 'act'"):
        train_here([f"resume={whole_run}", "policy=upstream", "policy.type=act"])


IGNORED = ("optimizer=sgd", "scheduler=diffuser", "logging=wandb", "+peft.r=64", "+logging.options.project=other")


@pytest.mark.parametrize("choice", IGNORED)
def test_a_choice_that_resuming_would_ignore_is_refused(whole_run: Path, choice: str) -> None:
    with pytest.raises(
        ValueError, match=rf"{re.escape(choice)} cannot be chosen when resuming.*policy.pretrained_path="
    ):
        train_here([f"resume={whole_run}", choice])


def test_a_checkpoint_of_plain_upstream_resumes(
    demonstrations: Path, tmp_path: Path, weights_of: Callable[[Path], Weights]
) -> None:
    """It holds nothing of embodix; the sizes are given on the command line, since upstream does not save them."""
    run = tmp_path / "run"
    first = train_upstream(small_run(demonstrations, f"train.output_dir={run}", "train.steps=2"))
    assert len(first) == 2
    assert not list(run.rglob("embodix*"))
    before = weights_of(run)
    overrides = [o for o in small_run(demonstrations) if not o.startswith("train.")]
    result = train_here([f"resume={run}", *overrides, "train.steps=4", "schedule.on_resume=keep", "+plugin=embodix"])
    assert [record.step for record in result.records] == [3, 4]
    assert not all(torch.equal(before[name], tensor) for name, tensor in weights_of(run).items())
    assert find_checkpoint(run).loader_state() is not None
