# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are evaluated in processes of their own, in order; the best is kept."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from embodix.report.evaluation import read_evaluations
from embodix.training.checkpoint_evaluation import CheckpointEvaluation, EvaluationPlan, move_link

# Solves as many of four episodes as the checkpoint's file says; "fails" ends with an error, "hangs" sleeps.
EVALUATE = """
import json, sys, time, pathlib
checkpoint, folder = map(pathlib.Path, sys.argv[1:])
solved = (checkpoint / "solved").read_text()
if solved == "fails":
    sys.exit("no simulator")
if solved == "hangs":
    time.sleep(600)
while not (checkpoint / "go").exists():
    time.sleep(0.01)
folder.mkdir(parents=True)
episodes = [{"task": "reach-v3", "seed": seed, "success": seed < int(solved), "num_steps": 9} for seed in range(4)]
(folder / "results.json").write_text(json.dumps({"episodes": episodes}))
"""


def evaluate_command(checkpoint: Path, folder: Path) -> list[str]:
    return [sys.executable, "-S", "-c", EVALUATE, str(checkpoint), str(folder)]


def save(run: Path, step: int, solved: str, go: bool = True) -> Path:
    checkpoint = run / "checkpoints" / f"{step:06d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "solved").write_text(solved)
    if go:
        (checkpoint / "go").touch()
    move_link(run / "checkpoints" / "last", checkpoint)
    return checkpoint


def evaluation(run: Path, **options: object) -> CheckpointEvaluation:
    return CheckpointEvaluation(EvaluationPlan(every=10, command=evaluate_command, **options), run)  # type: ignore[arg-type]


def test_results_are_recorded_in_the_order_of_the_checkpoints_and_the_best_is_linked(tmp_path: Path) -> None:
    running = evaluation(tmp_path)
    for step, solved in ((10, "1"), (20, "3"), (25, "4"), (30, "2")):
        running.checkpoint_saved(step, save(tmp_path, step, solved))
    running.finish()
    records = read_evaluations(tmp_path)
    assert [(r.step, r.success.num_success, r.success.num_episodes) for r in records] == [
        (10, 1, 4),
        (20, 3, 4),
        (30, 2, 4),
    ]
    assert records[1].by_task["reach-v3"].num_success == 3
    assert (tmp_path / "checkpoints" / "best").resolve().name == "000020"
    assert (tmp_path / "checkpoints" / "last").resolve().name == "000030"


def test_of_equal_checkpoints_the_later_is_the_best(tmp_path: Path) -> None:
    running = evaluation(tmp_path)
    for step in (10, 20):
        running.checkpoint_saved(step, save(tmp_path, step, "2"))
    running.finish()
    assert (tmp_path / "checkpoints" / "best").resolve().name == "000020"


def test_training_goes_on_while_an_evaluation_runs(tmp_path: Path) -> None:
    running = evaluation(tmp_path)
    first = save(tmp_path, 10, "1", go=False)
    running.checkpoint_saved(10, first)
    running.checkpoint_saved(20, save(tmp_path, 20, "2"))
    running.poll()
    assert read_evaluations(tmp_path) == []
    (first / "go").touch()
    while not read_evaluations(tmp_path):
        running.poll()
        time.sleep(0.01)
    running.finish()
    assert [record.step for record in read_evaluations(tmp_path)] == [10, 20]


def test_waiting_returns_with_the_result(tmp_path: Path) -> None:
    evaluation(tmp_path, waits=True).checkpoint_saved(10, save(tmp_path, 10, "1"))
    assert len(read_evaluations(tmp_path)) == 1


def test_training_waits_when_too_many_checkpoints_are_pending(tmp_path: Path) -> None:
    running = evaluation(tmp_path, max_pending=0)
    running.checkpoint_saved(10, save(tmp_path, 10, "1"))
    running.checkpoint_saved(20, save(tmp_path, 20, "1"))
    assert [record.step for record in read_evaluations(tmp_path)] == [10]
    running.finish()


def test_checkpoints_that_are_neither_best_nor_last_can_be_deleted(tmp_path: Path) -> None:
    running = evaluation(tmp_path, keep="best_and_last", waits=True)
    for step, solved in ((10, "1"), (20, "3"), (30, "2"), (40, "0")):
        running.checkpoint_saved(step, save(tmp_path, step, solved))
    running.finish()
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir() if not path.is_symlink()}
    assert kept == {"000020", "000040"}
    assert [record.step for record in read_evaluations(tmp_path)] == [10, 20, 30, 40]


def test_a_failed_evaluation_is_an_error_at_the_end_and_costs_no_other(tmp_path: Path) -> None:
    running = evaluation(tmp_path)
    running.checkpoint_saved(10, save(tmp_path, 10, "fails"))
    running.checkpoint_saved(20, save(tmp_path, 20, "2"))
    with pytest.raises(RuntimeError, match=r"1 evaluations failed; see .*000010\.log"):
        running.finish()
    assert [record.step for record in read_evaluations(tmp_path)] == [20]
    assert "no simulator" in (tmp_path / "evaluations" / "000010.log").read_text()


def test_stopping_ends_the_running_evaluation(tmp_path: Path) -> None:
    running = evaluation(tmp_path)
    running.checkpoint_saved(10, save(tmp_path, 10, "hangs"))
    running.stop()
    running.finish()
    assert read_evaluations(tmp_path) == []


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("keep", "none", "must be one of all, best_and_last"),
        ("num_threads", 0, "at least 1"),
        ("max_pending", -1, "at least 0"),
    ],
)
def test_a_plan_refuses_what_it_cannot_do(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvaluationPlan(every=10, command=evaluate_command, **{field: value})  # type: ignore[arg-type]
