# SPDX-License-Identifier: Apache-2.0
"""A step that is not finite never reaches the optimizer, and the error says which samples it held."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from embodix.patching import patched, replace_attribute
from embodix.report.steps import read_steps
from embodix.testing.host_runs import train_here
from embodix.training.finite import NonFiniteError, StepSamples, non_finite_state
from embodix.training.loader import LoaderState
from embodix.training.run_data import RunData
from embodix.training.stopped import RunStoppedError

Overrides = Callable[..., list[str]]
VARIANTS = (
    ["+plugin=none"],
    ["+plugin=embodix"],
    ["+plugin=embodix", "packing=token_budget"],
    ["policy.optimizer_grad_clip_norm=0"],
)


@pytest.fixture
def loss_of_third_step() -> Iterator[None]:
    """Upstream's loop differentiates a NaN at its third step."""
    from embodix.training.accelerator import ObservedAccelerator

    backward, calls = ObservedAccelerator.backward, [0]

    def break_third(self: Any, loss: torch.Tensor, **kwargs: Any) -> None:
        calls[0] += 1
        backward(self, loss * float("nan") if calls[0] == 3 else loss, **kwargs)

    undo = replace_attribute(ObservedAccelerator, "backward", break_third)
    yield
    undo()


@pytest.mark.parametrize("variant", VARIANTS, ids=["upstream", "packed", "composed", "without_clipping"])
def test_a_loss_that_is_not_finite_ends_the_run_before_the_optimizer(
    blobs: Path, run_of: Overrides, tmp_path: Path, loss_of_third_step: None, variant: list[str]
) -> None:
    with pytest.raises(NonFiniteError, match=r"Step 3 has a loss of nan(?s:.*)episode \d frame \d+, task '.*'"):
        train_here(run_of(blobs, *variant, "train.steps=6", "train.save_freq=1"))
    assert [record.step for record in read_steps(tmp_path / "run" / "steps.jsonl")] == [1, 2]
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["000001", "000002", "last"]
    assert (checkpoints / "last").readlink() == Path("000002")


BROKEN = {
    "action": (NonFiniteError, r"\n  episode 1 frame \d, task .*, not finite: action"),
    "observation.state": (ValueError, r"observation\.state\[0\] of frame 17 of the data set is nan"),
}


@pytest.mark.parametrize("key", BROKEN)
@pytest.mark.parametrize("variant", VARIANTS[:3], ids=["upstream", "packed", "composed"])
def test_a_broken_number_in_the_data_is_named(
    blobs: Path, run_of: Overrides, tmp_path: Path, variant: list[str], key: str
) -> None:
    """Of data that nobody has checked. The policy would make a token of a broken state, and its loss be finite."""
    broken = shutil.copytree(blobs, tmp_path / "broken")
    (data,) = (broken / "data").rglob("*.parquet")
    table = pq.read_table(data)
    column = table.column_names.index(key)
    values = table.column(column).to_pylist()
    values[12 + 5][0] = float("nan")
    field = table.schema.field(column)
    pq.write_table(table.set_column(column, field, pa.array(values, type=field.type)), data)
    error, words = BROKEN[key]
    with pytest.raises(error, match=words):
        train_here(run_of(broken, *variant, "train.steps=9", "check=off"))


def test_without_clipping_the_gradient_norm_is_recorded(blobs: Path, run_of: Overrides) -> None:
    records = train_here(run_of(blobs, "train.steps=2", "policy.optimizer_grad_clip_norm=0")).records
    assert all(0 < record.grad_norm < float("inf") for record in records)


def test_weights_that_are_not_finite_become_no_checkpoint(blobs: Path, run_of: Overrides, tmp_path: Path) -> None:
    """Finite gradients, and an optimizer that overflows in the step that is saved."""

    def overflow(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        optimizer.param_groups[0]["params"][0].data.mul_(float("inf"))

    hook = register_optimizer_step_post_hook(overflow)
    try:
        with pytest.raises(NonFiniteError, match=r"After step 1 1 weights \(.*\) are not finite; no checkpoint"):
            train_here(run_of(blobs, "train.steps=1"))
    finally:
        hook.remove()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_what_the_optimizer_keeps_is_looked_at_too() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert non_finite_state(1, layer.named_parameters(), optimizer) is None
    optimizer.state[layer.bias]["exp_avg_sq"][0] = float("inf")
    problem = non_finite_state(1, layer.named_parameters(), optimizer)
    assert problem is not None and "the optimizer's state of 1 weights are not finite" in problem


def test_samples_are_placed_by_what_the_batch_has() -> None:
    raw = {"episode_index": torch.tensor([3]), "frame_index": torch.tensor([7]), "action": torch.tensor([[1.0]])}
    preprocessed = {"episode_index": torch.tensor([3]), "index": torch.tensor([47]), "task": ["push"]}
    assert StepSamples(raw, {}).describe() == ["episode 3 frame 7"]
    assert StepSamples(preprocessed, {3: 40}).describe() == ["episode 3 frame 7, task 'push'"]
    assert StepSamples(preprocessed, {}).describe() == ["episode 3, index 47, task 'push'"]
    raw["action"][0, 0] = float("inf")
    assert StepSamples(raw, {}).describe() == ["episode 3 frame 7, not finite: action"]
    assert not StepSamples(raw, {}).inputs_are_finite()


def _fail_after_the_first(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fault: Exception) -> None:
    """The second call leaves half a file and fails."""
    save, calls = getattr(owner, name), []

    def failing(self: Any, folder: Path) -> None:
        calls.append(folder)
        if len(calls) > 1:
            (folder / "embodix_half.json").write_bytes(b"half")
            raise fault
        save(self, folder)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [(LoaderState, "save", OSError(28, "No space left")), (RunData, "save_embodiments", TypeError("no len()"))],
)
def test_an_addition_that_fails_keeps_upstreams_files_and_the_checkpoint_before(
    blobs: Path, run_of: Overrides, tmp_path: Path, owner: type, name: str, fault: Exception
) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    kept = r"000004 is kept, with upstream's own files alone.*(No space|no len).*resume=\S+/000002` continues"
    with pytest.MonkeyPatch.context() as patch:
        _fail_after_the_first(patch, owner, name, fault)
        with pytest.raises(RunStoppedError, match=kept):
            train_here(run_of(blobs, "train.steps=4", "train.save_freq=2"))
    names = {path.name for path in (checkpoints / "000004").rglob("*")}
    assert {"model.safetensors", "optimizer_state.safetensors", "training_step.json"} <= names
    assert not [name for name in names if name.startswith("embodix")]
    assert (checkpoints / "last").readlink() == Path("000002")
    assert [record.step for record in train_here([f"resume={tmp_path}/run"]).records] == [3, 4]
    assert (checkpoints / "last").readlink() == Path("000004")


def test_a_whole_checkpoint_is_not_replaced_by_upstreams_files_alone(tmp_path: Path) -> None:
    from lerobot.scripts import lerobot_train

    def save(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "weights").write_text(str(len(tried)))

    def add(folder: Path) -> None:
        tried.append(folder)
        if len(tried) > 1:
            raise OSError(28, "No space left on device")
        (folder / "overrides").touch()

    tried: list[Path] = []
    undo_save = replace_attribute(lerobot_train, "save_checkpoint", save)
    try:
        with patched({"lerobot_atomic_checkpoint": {"on_saved": add}}):
            lerobot_train.save_checkpoint(tmp_path / "run" / "checkpoints" / "000002")
            with pytest.raises(RunStoppedError, match=r"000002 could not be written: .*Nothing of this try is left"):
                lerobot_train.save_checkpoint(tmp_path / "run" / "checkpoints" / "000002")
            with pytest.raises(RunStoppedError, match=r"000004 is kept, .*no checkpoint stands before it"):
                lerobot_train.save_checkpoint(tmp_path / "run" / "checkpoints" / "000004")
    finally:
        undo_save()
    assert {path.name for path in (tmp_path / "run" / "checkpoints" / "000002").iterdir()} == {"weights", "overrides"}
    assert (tmp_path / "run" / "checkpoints" / "000002" / "weights").read_text() == "0"


def test_samples_are_counted_by_what_has_one_row_a_sample():
    sizes_of_cameras = torch.ones(6, 2)
    sizes_of_cameras[1] = torch.nan
    batch = {"sizes": sizes_of_cameras, "index": torch.tensor([5, 6]), "task": ["push", "pull"]}
    assert StepSamples(batch, {}).describe() == ["index 5, task 'push'", "index 6, task 'pull'"]
    actions = torch.tensor([[0.0], [torch.inf]])
    tokens = torch.ones(9, dtype=torch.long)
    unnamed = StepSamples({"packed": tokens, "action": actions, "embodiments": ["arm"]}, {}).describe()
    assert unnamed == ["row 0 of a batch without episode_index", "not finite: action"]
    assert StepSamples({"packed": tokens}, {}).describe() == []
