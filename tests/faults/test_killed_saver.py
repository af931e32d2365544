# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of which each process writes its part, cut off at any moment, on a full disk, and gone on from."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from embodix.report.steps import read_steps
from embodix.testing.host_runs import train_here
from embodix.training import background_saving
from embodix.training.background_saving import BackgroundSaver
from embodix.training.stopped import RunStoppedError

KILLED_SAVERS = Path(__file__).with_name("killed_savers.py")
STATE = {"model": {"weight": torch.ones(4)}, "optimizer": {"weight::exp_avg": torch.ones(4)}}


@pytest.mark.slow
def test_killed_ten_times_in_the_middle_of_a_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, str(KILLED_SAVERS), str(tmp_path), "10"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("KILLED") == 10
    assert int(done.stdout.rpartition("UNFINISHED")[2]) >= 5, "the kills came between checkpoints"


@pytest.fixture
def saver() -> BackgroundSaver:
    finished: list[Path] = []
    made = BackgroundSaver(Accelerator(cpu=True), most_failures=2, on_finished=finished.append)
    made.told = finished  # type: ignore[attr-defined]
    return made


def _save(saver: BackgroundSaver, place: Path) -> None:
    saver.begin(place, STATE)
    saver.add_hosts_files(lambda folder: (folder / "pretrained_model").mkdir())


def test_a_checkpoint_is_told_of_once_it_is_in_its_place(saver: Any, tmp_path: Path) -> None:
    _save(saver, tmp_path / "000001")
    saver.settle()
    assert saver.told == [tmp_path / "000001"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001", "last"]
    assert torch.equal(load_file(tmp_path / "last" / "pretrained_model" / "model.safetensors")["weight"], torch.ones(4))


def _disk_full(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_said_and_borne_up_to_a_limit(
    saver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _save(saver, tmp_path / "000001")
    saver.settle()
    with monkeypatch.context() as full, caplog.at_level(logging.ERROR):
        full.setattr(background_saving, "export_model", _disk_full)
        for step in (2, 3):
            _save(saver, tmp_path / f"00000{step}")
            saver.settle()
            assert f"{step - 1} in a row" in caplog.messages[-1] and "No space left" in caplog.messages[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001", "last"]

    _save(saver, tmp_path / "000004")  # a checkpoint that succeeds begins the count anew
    saver.settle()
    monkeypatch.setattr(background_saving, "begin_saving", _disk_full)
    for step in (5, 6):
        _save(saver, tmp_path / f"00000{step}")
    _save(saver, tmp_path / "000007")
    with pytest.raises(RunStoppedError, match=r"3 in a row.*lerobot train resume="):
        saver.settle()
    assert (tmp_path / "last").resolve() == tmp_path / "000004"


def test_the_last_checkpoint_of_a_run_must_be_written(
    saver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_saving, "export_model", _disk_full)
    _save(saver, tmp_path / "000001")
    with pytest.raises(RunStoppedError, match="No space left on device"):
        saver.settle(last=True)


@pytest.mark.slow
def test_sharded_checkpoints_of_one_process_go_on_to_the_bit(
    run_overrides: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    whole = train_here([*run_overrides(tmp_path / "whole" / "run"), "checkpoint.format=sharded"])
    half = [*run_overrides(tmp_path / "half" / "run"), "checkpoint.format=sharded", "train.steps=2"]
    train_here([*half, "schedule.steps=4"])
    resumed = train_here([f"resume={tmp_path}/half/run", "train.steps=4"])
    expected = {record.step: (record.loss, record.grad_norm) for record in read_steps(whole.output_dir / "steps.jsonl")}
    assert {r.step: (r.loss, r.grad_norm) for r in resumed.records} == {s: expected[s] for s in (3, 4)}
    ours, theirs = (
        load_file(tmp_path / name / "run" / "checkpoints" / "last" / "pretrained_model" / "model.safetensors")
        for name in ("half", "whole")
    )
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    state = tmp_path / "half" / "run" / "checkpoints" / "last" / "training_state"
    assert not (state / "optimizer_state.safetensors").exists() and (state / "sharded" / ".metadata").is_file()
