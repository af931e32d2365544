# SPDX-License-Identifier: Apache-2.0
"""Hydra multirun with each launcher and sweeper ends in one comparison of its runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from embodix.cli.main import dispatch
from embodix_pi05.testing import small_run

pytestmark = pytest.mark.slow


def _sweep(root: Path, folder: Path, *overrides: str) -> int:
    """``lerobot train -m ...`` of two-step runs in this process (joblib's jobs have processes of their own)."""
    base = small_run(root, "train.steps=2", "train.save_checkpoint=false", f"hydra.sweep.dir={folder}")
    return dispatch("lerobot", ["train", "-m", *base, *overrides])


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["+plugin=none,embodix"], ["+plugin=none", "+plugin=embodix"]),
        (
            ["+plugin=none,embodix", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
            ["+plugin=none", "+plugin=embodix"],
        ),
        (
            [
                "hydra/sweeper=optuna",
                "hydra.sweeper.n_trials=2",
                "hydra.sweeper.n_jobs=1",
                "policy.optimizer_lr=interval(1e-4,1e-2)",
            ],
            None,
        ),
    ],
    ids=["basic", "joblib", "optuna"],
)
def test_a_sweep_ends_in_one_report(
    demonstrations: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    names: list[str] | None,
) -> None:
    monkeypatch.setattr(sys, "argv", ["lerobot"])
    monkeypatch.setenv("COLUMNS", "200")
    code = _sweep(demonstrations, tmp_path, *overrides)
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert f"Report: {tmp_path}/report.html" in printed.out
    report = json.loads((tmp_path / "report.json").read_text())
    compared = [variant["name"] for variant in report["variants"]]
    assert len(compared) == 2
    assert names is None or compared == names
    assert all(name.split()[0] in printed.out for name in compared)
    assert (tmp_path / "report.html").stat().st_size > 10_000
