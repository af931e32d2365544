# SPDX-License-Identifier: Apache-2.0
"""The evaluations of a run while it trained, one JSON line each, and which checkpoint is the best."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from embodix.report.evaluation import SuccessRate
from embodix.report.json_lines import append_line, read_lines

EVALUATIONS_FILE = "evaluations.jsonl"


@dataclass(frozen=True)
class EvaluationRecord:
    """Success of one checkpoint.

    Attributes:
        step: training steps behind the checkpoint.
        checkpoint: its folder, relative to the run folder.
        success: over all episodes.
        by_task: success of each task.
        wall_s: seconds from the checkpoint to its result.
    """

    step: int
    checkpoint: str
    success: SuccessRate
    by_task: dict[str, SuccessRate]
    wall_s: float


def append_evaluation(run_folder: Path | str, record: EvaluationRecord) -> None:
    """Add one record to the run's evaluations."""
    append_line(Path(run_folder) / EVALUATIONS_FILE, dataclasses.asdict(record), _decode)


def read_evaluations(run_folder: Path | str) -> list[EvaluationRecord]:
    """The run's evaluations ordered by step, of two of one step the later; none where there is no file.

    Raises:
        ValueError: a line other than an incomplete last one is not an evaluation.
    """
    path = Path(run_folder) / EVALUATIONS_FILE
    if not path.is_file():
        return []
    by_step = {record.step: record for record in read_lines(path, _decode, "an evaluation")}
    return [by_step[step] for step in sorted(by_step)]


def best_evaluation(records: Sequence[EvaluationRecord]) -> EvaluationRecord | None:
    """The record of the highest success rate, the latest of equals; None where there is none."""
    return max(records, key=lambda record: (record.success.rate, record.step), default=None)


def _decode(line: bytes) -> EvaluationRecord:
    fields = json.loads(line)
    success = SuccessRate(**fields.pop("success"))
    by_task = {task: SuccessRate(**rate) for task, rate in fields.pop("by_task").items()}
    return EvaluationRecord(**fields, success=success, by_task=by_task)
