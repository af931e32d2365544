# SPDX-License-Identifier: Apache-2.0
"""The page of a run that was evaluated while it trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodix.report.evaluation import (
    EvaluationRecord,
    SuccessRate,
    append_evaluation,
    best_evaluation,
    read_evaluations,
)
from embodix.report.manifest import collect_manifest
from embodix.report.run_page import write_run_page
from embodix.report.steps import StepRecord, append_step


def record(step: int, solved: int, task: str = "reach-v3") -> EvaluationRecord:
    rate = SuccessRate.of([True] * solved + [False] * (10 - solved))
    return EvaluationRecord(step, f"checkpoints/{step:06d}", rate, {task: rate, "push-v3": rate}, wall_s=12.5)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    collect_manifest("embodix", seed=7, config={"policy": {"type": "pi05"}}).save(tmp_path / "manifest.json")
    for step in range(1, 41):
        append_step(
            tmp_path / "steps.jsonl", StepRecord(step, 1 / step, 1.0, 1e-3, 8, {"forward": 0.1}, {"forward": 0.1})
        )
    return tmp_path


def test_evaluations_are_read_back_by_step_and_a_repeated_step_counts_once(tmp_path: Path) -> None:
    for item in (record(20, 3), record(10, 1), record(20, 4)):
        append_evaluation(tmp_path, item)
    assert read_evaluations(tmp_path) == [record(10, 1), record(20, 4)]


def test_the_best_is_the_latest_of_the_highest() -> None:
    assert best_evaluation([]) is None
    assert best_evaluation([record(10, 4), record(20, 4), record(30, 2)]) == record(20, 4)


def test_the_page_shows_curves_checkpoints_and_the_best(run: Path) -> None:
    for item in (record(20, 3), record(40, 9, task="<drawer>")):
        append_evaluation(run, item)
    text = write_run_page(run).read_text()
    assert "step 40: 9/10 = 90 %" in text
    assert "3/10" in text and "checkpoints/000020" in text
    assert "&lt;drawer&gt;" in text and "<drawer>" not in text
    assert text.count("<svg") == 1 and "http://" not in text.replace("http://www.w3.org", "")


def test_a_run_without_evaluations_has_no_such_page(run: Path) -> None:
    with pytest.raises(ValueError, match="evaluation=background"):
        write_run_page(run)
