# SPDX-License-Identifier: Apache-2.0
"""A sweep in which a job fails names it and still shows what the others made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import DictConfig

from embodix.cli import sweep
from embodix.cli.hydra_app import run_hydra_app
from embodix.cli.main import dispatch


def fails_at(cfg: DictConfig) -> float:
    """A task that takes no host: it fails where a seed is 2."""
    if cfg.train.seed == 2:
        raise ValueError("seed 2 has no luck\nand a second line")
    return float(cfg.train.seed)


def test_a_failed_job_is_named_and_the_others_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shown: list[Path] = []
    monkeypatch.setattr(sweep.SweepTable, "show", lambda self, folder: shown.append(folder))
    monkeypatch.setattr("sys.argv", ["lerobot train"])
    words = ["-m", "policy=pi05_small", "train.seed=1,2,3", f"hydra.sweep.dir={tmp_path}"]
    code = run_hydra_app("train", fails_at, words)
    printed = capfd.readouterr()
    assert code == 1
    assert "Job 1 failed (policy=pi05_small train.seed=2): ValueError: seed 2 has no luck\n" in printed.out
    assert "error: seed 2 has no luck" in printed.err
    assert shown == [tmp_path]
    assert [path.parent.name for path in tmp_path.glob(f"*/{sweep.FAILURE_FILE}")] == ["1"]


@pytest.mark.slow
def test_failed_jobs_in_processes_of_their_own_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["lerobot"])
    words = ["policy=pi05_small", f"dataset.root={tmp_path}/nowhere", f"hydra.sweep.dir={tmp_path}/sweep"]
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    assert dispatch("lerobot", ["train", "-m", *words, "train.steps=0,1", *launcher]) == 1
    printed = capfd.readouterr().out
    assert "train.steps=0): ValueError: train.steps must be at least 1; got 0." in printed
    assert "train.steps=1): ValueError: No LeRobotDataset at" in printed
    assert "No comparison" in printed


def test_a_sweep_that_ends_well_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Path] = []
    monkeypatch.setattr(sweep.SweepTable, "show", lambda self, folder: shown.append(folder))
    monkeypatch.setattr("sys.argv", ["lerobot train"])
    words = ["-m", "policy=pi05_small", "train.seed=1,3", f"hydra.sweep.dir={tmp_path}"]
    assert run_hydra_app("train", fails_at, words) == 0
    assert shown == [tmp_path]


def test_a_failure_without_words_is_kept_too(tmp_path: Path) -> None:
    sweep.keep_failure(tmp_path / "3", ["a=b"], RuntimeError())
    assert json.loads((tmp_path / "3" / sweep.FAILURE_FILE).read_text()) == {
        "overrides": ["a=b"],
        "error": "RuntimeError: ",
    }
