# SPDX-License-Identifier: Apache-2.0
"""A run that dies while saving leaves the checkpoint before it whole, and resumes from it to the bit."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from embodix.report.steps import read_steps
from embodix.testing.host_runs import train_here
from embodix.training.checkpoint import find_checkpoint

FailingRun = Callable[..., subprocess.CompletedProcess[str]]
Overrides = Callable[[Path], list[str]]
MODEL = "pretrained_model/model.safetensors"


@pytest.fixture(scope="module")
def whole_run(run_overrides: Overrides, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return train_here(run_overrides(tmp_path_factory.mktemp("whole") / "run")).output_dir


def _assert_resumes_like(run: Path, whole: Path) -> None:
    """``last`` is the first checkpoint, whole; the rest of the run is what it would have been."""
    checkpoint = find_checkpoint(run)
    assert checkpoint.step == 2
    assert (run / "checkpoints" / "last").resolve() == checkpoint.folder
    files = sorted(path.relative_to(checkpoint.folder) for path in checkpoint.folder.rglob("*") if path.is_file())
    first = whole / "checkpoints" / "000002"
    assert files == sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert (checkpoint.folder / MODEL).read_bytes() == (first / MODEL).read_bytes()

    result = train_here([f"resume={run}"])
    assert [record.step for record in result.records] == [3, 4]
    ours, theirs = read_steps(run / "steps.jsonl"), read_steps(whole / "steps.jsonl")
    assert [(r.step, r.loss, r.grad_norm) for r in ours] == [(r.step, r.loss, r.grad_norm) for r in theirs]
    resumed, expected = (load_file(folder / "checkpoints" / "last" / MODEL) for folder in (run, whole))
    assert [name for name in expected if not torch.equal(resumed[name], expected[name])] == []
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["000002", "000004", "last"]


@pytest.mark.slow
def test_killed_while_saving(
    failing_run: FailingRun, run_overrides: Overrides, tmp_path: Path, whole_run: Path
) -> None:
    run = tmp_path / "run"
    done = failing_run("killed", run_overrides(run))
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert (run / "checkpoints" / ".000004.unfinished" / MODEL).is_file()  # it died in the middle of a checkpoint
    assert not (run / "checkpoints" / "000004").exists()
    _assert_resumes_like(run, whole_run)


@pytest.mark.slow
def test_disk_full_while_saving(
    failing_run: FailingRun, run_overrides: Overrides, tmp_path: Path, whole_run: Path
) -> None:
    run = tmp_path / "run"
    done = failing_run("disk_full", run_overrides(run))
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith((".", "000004"))]
    _assert_resumes_like(run, whole_run)
