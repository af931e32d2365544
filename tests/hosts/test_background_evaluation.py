# SPDX-License-Identifier: Apache-2.0
"""``evaluation=background`` end to end: training is untouched, checkpoints are evaluated, the best is kept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from embodix.cli.main import dispatch
from embodix.report.evaluation import best_evaluation, read_evaluation, read_evaluations
from embodix.report.steps import read_steps
from embodix.testing.host_runs import train_here
from embodix_pi05.testing import small_run

pytestmark = pytest.mark.slow
SIMULATOR = ["env=metaworld", "env.image_size=28", "env.episode_length=6"]
EVALUATION = [
    "evaluation=background",
    "train.eval_freq=2",
    "train.save_freq=2",
    "eval.n_episodes=2",
    "eval.batch_size=2",
]


def test_checkpoints_are_evaluated_while_training_goes_on(
    demonstrations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lerobot"])
    folder = tmp_path / "run"
    run = small_run(demonstrations, "train.steps=4", "+plugin=embodix")
    assert dispatch("lerobot", ["train", *run, *SIMULATOR, *EVALUATION, f"train.output_dir={folder}"]) == 0
    records = read_evaluations(folder)
    assert [record.step for record in records] == [2, 4]
    assert [record.success.num_episodes for record in records] == [2, 2]
    best = best_evaluation(records)
    assert best is not None
    assert (folder / "checkpoints" / "best").resolve() == folder / best.checkpoint
    evaluation = read_evaluation(folder / "evaluations" / "000004" / "results.json")
    assert evaluation is not None and [episode.seed for episode in evaluation.episodes] == [200_000, 200_001]
    assert evaluation.details["policy"]["features"]["packing"] == "padding_free"
    assert "checkpoints/best" in (folder / "report.html").read_text()
    alone = train_here([*run, f"train.output_dir={tmp_path}/alone"])
    assert [record.loss for record in read_steps(folder / "steps.jsonl")] == [record.loss for record in alone.records]
