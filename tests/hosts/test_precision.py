# SPDX-License-Identifier: Apache-2.0
"""Runs with FP8 matrix products through upstream's loop: optimizer and checkpoints stay those of a run without."""

from __future__ import annotations

import copy
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from embodix.report.steps import read_steps
from embodix.testing.host_runs import train_here
from embodix.training.session import TrainingSession
from embodix_fp8.precision import block_scaling
from embodix_fp8.precision.block_scaling import BlockRoundedLinear, EmulatedBlocks
from embodix_fp8.precision.gemm_gate import GemmGate
from embodix_groot.testing import small_groot_run
from embodix_pi05.testing import small_run

Weights = dict[str, torch.Tensor]
NUM_STEPS, HALF = 6, 3


@pytest.fixture(scope="module")
def run_of(demonstrations: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a packed run of six steps with a checkpoint after three, trained once a choice of overrides."""

    @functools.cache
    def train(*overrides: str, plugin: str = "embodix") -> Path:
        folder = tmp_path_factory.mktemp("precision") / "run"
        options = [f"train.steps={NUM_STEPS}", f"train.save_freq={HALF}", f"train.output_dir={folder}"]
        train_here(small_run(demonstrations, f"+plugin={plugin}", *options, *overrides))
        return folder

    return train


def _losses(run: Path) -> list[float]:
    return [record.loss for record in read_steps(run / "steps.jsonl")]


def _after_half(run: Path, folder: Path) -> Path:
    """A copy of the run as it stood at its first checkpoint."""
    shutil.copytree(run, folder, symlinks=True)
    shutil.rmtree(folder / "checkpoints" / f"{NUM_STEPS:06d}")
    last = folder / "checkpoints" / "last"
    last.unlink()
    last.symlink_to(f"{HALF:06d}")
    steps = (folder / "steps.jsonl").read_text().splitlines(keepends=True)
    (folder / "steps.jsonl").write_text("".join(steps[:HALF]))
    return folder


def _optimizer_state(run: Path, step: int) -> Weights:
    return load_file(run / "checkpoints" / f"{step:06d}" / "training_state" / "optimizer_state.safetensors")


def _settings(run: Path) -> Any:
    return json.loads((run / "manifest.json").read_text())["settings"]


def test_the_manifest_lists_every_module_and_says_what_emulation_costs(run_of: Callable[..., Path]) -> None:
    described = _settings(run_of("precision=fp8"))["precision"]
    assert described["kernel"] == "torchao rowwise, emulated"
    assert "this run is on cpu" in described["fallback"]
    assert described["gemm_gate"] == "not timed: emulated"
    assert len(described["converted"]) == 21  # three decoder layers
    assert all(".language_model.layers." in module["path"] for module in described["converted"])
    assert {module["reason"] for module in described["skipped"]} >= {"vision tower: always in high precision"}


@pytest.mark.parametrize("precision", ["fp8", "fp8_tensorwise", "fp8_rowwise_gw_hp", "fp8_block_emulated"])
def test_losses_stay_near_those_of_float32(run_of: Callable[..., Path], precision: str) -> None:
    losses, reference = _losses(run_of(f"precision={precision}")), _losses(run_of())
    assert losses != reference
    assert losses == pytest.approx(reference, rel=2e-2)


def test_the_checkpoint_holds_what_it_holds_without(
    run_of: Callable[..., Path], weights_of: Callable[[Path], Weights]
) -> None:
    run, reference = run_of("precision=fp8"), run_of()
    for theirs, ours in (
        (weights_of(reference), weights_of(run)),
        (_optimizer_state(reference, HALF), _optimizer_state(run, HALF)),
    ):
        assert {name: (t.dtype, t.shape) for name, t in ours.items()} == {
            name: (t.dtype, t.shape) for name, t in theirs.items()
        }


@pytest.mark.parametrize("precision", ["fp8", "fp8_block_emulated"])
def test_six_steps_are_three_and_three(
    run_of: Callable[..., Path], weights_of: Callable[[Path], Weights], tmp_path: Path, precision: str
) -> None:
    whole = run_of(f"precision={precision}")
    resumed = _after_half(whole, tmp_path / "run")
    train_here([f"resume={resumed}"])
    assert _losses(resumed) == _losses(whole)
    ours, theirs = weights_of(resumed), weights_of(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_upstreams_own_computation_trains_in_fp8_too(run_of: Callable[..., Path]) -> None:
    manifest = json.loads((run_of("precision=fp8", plugin="none") / "manifest.json").read_text())
    assert manifest["attention"] == "upstream dense eager"
    assert len(manifest["settings"]["precision"]["converted"]) == 21


@pytest.mark.slow
def test_composed_batches_in_fp8_resume_to_the_bit(
    run_of: Callable[..., Path], weights_of: Callable[[Path], Weights], tmp_path: Path
) -> None:
    """Bins of any number of rows, two micro-batches a step."""
    composed = ["packing=token_budget", "packing.options.bins_per_step=2", "train.batch_size=4"]
    whole, without = run_of(*composed, "precision=fp8"), run_of(*composed)
    assert _losses(whole) != _losses(without)
    assert _losses(whole) == pytest.approx(_losses(without), rel=2e-2)
    resumed = _after_half(whole, tmp_path / "run")
    train_here([f"resume={resumed}"])
    assert _losses(resumed) == _losses(whole)
    ours, theirs = weights_of(resumed), weights_of(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_groot_trains_in_fp8(demonstrations: Path, tmp_path: Path) -> None:
    runs = []
    for precision in ("none", "fp8"):
        options = [f"train.output_dir={tmp_path / precision}", "+plugin=embodix", f"precision={precision}"]
        runs.append(train_here(small_groot_run(demonstrations, *options)))
    losses, reference = ([record.loss for record in run.records] for run in runs)
    assert losses != reference
    assert losses[0] == pytest.approx(reference[0], rel=2e-2)  # Adam's first update of a random model parts them
    assert len(_settings(tmp_path / "fp8")["precision"]["converted"]) == 21


@pytest.fixture
def timed_blocks(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Emulated blocks take the place of Transformer Engine's; FP8 is faster for the gated MLP. Lists what is timed."""

    class TimedBlocks(EmulatedBlocks):
        def __init__(self) -> None:
            self.name, self.fallback = "blocks, for the test", None

    timed: list[nn.Module] = []

    def seconds(gate: GemmGate, layer: nn.Module, input_MK: torch.Tensor) -> float:
        timed.append(layer)
        is_mlp, is_fp8 = 64 in tuple(layer.weight.shape), isinstance(layer, BlockRoundedLinear)  # type: ignore[arg-type]
        return 0.5 if is_mlp == is_fp8 else 1.0

    monkeypatch.setattr(block_scaling, "transformer_engine_problem", lambda device: None)
    monkeypatch.setattr(block_scaling, "TransformerEngineKernel", TimedBlocks)
    monkeypatch.setattr(GemmGate, "_time", seconds)
    return timed


def test_a_run_times_its_products_once_and_a_resumed_run_takes_its_table(
    demonstrations: Path, tmp_path: Path, timed_blocks: list[nn.Module]
) -> None:
    run = tmp_path / "run"
    options = ["+plugin=embodix", "precision=fp8_block", "train.steps=2", "train.save_freq=1"]
    train_here(small_run(demonstrations, *options, f"train.output_dir={run}"))
    described, table = _settings(run)["precision"], run / "gemm_gate.json"
    assert {module["path"].rpartition(".")[2] for module in described["converted"]} == {
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    assert all("times as fast at" in module["reason"] for module in described["converted"])
    shapes = {(shape["K"], shape["N"]): shape["kept"] for shape in described["gemm_gate"]["shapes"]}
    assert shapes == {(32, 128): False, (32, 16): False, (128, 32): False, (32, 64): True, (64, 32): True}
    assert len(timed_blocks) == 2 * len(json.loads(table.read_text())["timings"])

    timed_blocks.clear()
    train_here([f"resume={run}/checkpoints/000001"])
    resumed = _settings(run)["precision"]
    assert timed_blocks == []
    assert resumed["gemm_gate"]["table_read_from"] == str(table)
    assert [m["path"] for m in resumed["converted"]] == [m["path"] for m in described["converted"]]

    other = [f"train.output_dir={tmp_path / 'other'}", f"precision.options.gemm_gate.table={table}", "train.steps=1"]
    train_here(small_run(demonstrations, *options[:2], *other))
    assert timed_blocks == []


@pytest.mark.parametrize(("trained", "resumed"), [("fp8", "none"), ("none", "fp8")])
def test_a_run_resumes_in_another_precision(
    run_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: str, resumed: str
) -> None:
    """The optimizer's state is taken over bit for bit."""
    run = _after_half(run_of(*([] if trained == "none" else [f"precision={trained}"])), tmp_path / "run")
    taken_over: list[Any] = []
    prepared = TrainingSession.prepared

    def recording(session: TrainingSession, policy: Any, optimizer: Any, *rest: Any) -> Any:
        taken_over.append(copy.deepcopy(optimizer.state_dict()["state"]))
        return prepared(session, policy, optimizer, *rest)

    monkeypatch.setattr(TrainingSession, "prepared", recording)
    with pytest.raises(ValueError, match=r"algorithm: precision was (?s:.*)'accept_changes=\[algorithm\]'"):
        train_here([f"resume={run}", f"precision={resumed}"])
    result = train_here([f"resume={run}", f"precision={resumed}", "accept_changes=[algorithm]"])
    assert [record.step for record in result.records] == [4, 5, 6]
    assert ("precision" in _settings(run)) == (resumed != "none")
    (state,) = taken_over
    flat = {f"state/{index}/{name}": value for index, own in state.items() for name, value in own.items()}
    saved = {name: value for name, value in _optimizer_state(run, HALF).items() if name.startswith("state/")}
    assert flat.keys() == saved.keys()
    assert all(torch.equal(flat[name], saved[name]) for name in saved)
