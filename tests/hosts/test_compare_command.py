# SPDX-License-Identifier: Apache-2.0
"""``lerobot compare`` end to end: trained in turns, evaluated in the simulator, reported."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from embodix.cli.main import dispatch
from embodix.report.evaluation import read_evaluation
from embodix.report.steps import read_steps
from embodix.testing.host_runs import train_here
from embodix_pi05.testing import small_run

pytestmark = pytest.mark.slow
NUM_STEPS = 4


def test_compare_trains_evaluates_and_reports(
    demonstrations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lerobot"])
    folder = tmp_path / "compare"
    run = small_run(demonstrations, f"train.steps={NUM_STEPS}")
    simulator = ["env=metaworld", "env.image_size=28", "env.episode_length=8", "eval.n_episodes=2", "eval.batch_size=2"]
    code = dispatch("lerobot", ["compare", *run, *simulator, f"hydra.run.dir={folder}"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert f"Report: {folder / 'report.html'}" in printed.out

    upstream, fast = (read_steps(folder / "variants" / name / "steps.jsonl") for name in ("upstream", "embodix"))
    assert [record.step for record in upstream] == list(range(1, NUM_STEPS + 1))
    assert [record.loss for record in fast] == pytest.approx([record.loss for record in upstream], rel=1e-5)
    alone = train_here([*run, f"train.output_dir={tmp_path}/alone"])
    assert [record.loss for record in alone.records] == [record.loss for record in upstream]

    for name in ("upstream", "embodix"):
        variant = folder / "variants" / name
        manifest = json.loads((variant / "manifest.json").read_text())
        assert manifest["flops_per_step"] > 0
        assert manifest["peak_memory_bytes"] > 0
        assert (variant / "checkpoints" / "last" / "pretrained_model" / "model.safetensors").is_file()
        evaluation = read_evaluation(folder / "evaluation" / name / "results.json")
        assert evaluation is not None
        assert [episode.seed for episode in evaluation.episodes] == [100_000, 100_001]
        assert set(evaluation.control_episodes) == {"blind", "blank_image"}
    report = json.loads((folder / "report.json").read_text())
    assert [variant["name"] for variant in report["variants"]] == ["upstream", "embodix"]
    assert all(variant["evaluation"]["success"]["num_episodes"] == 2 for variant in report["variants"])
