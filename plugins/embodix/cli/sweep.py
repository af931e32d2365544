# SPDX-License-Identifier: Apache-2.0
"""The tables at the end of a Hydra multirun, also of one in which jobs failed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

FAILURE_FILE = "failure.json"


class SweepEnd(Callback):
    """What is shown once all jobs have ended, whatever the launcher. Hydra does not come to ``on_multirun_end`` where a
    job failed; ``show_what_ended`` does then what it would have done.

    Attributes:
        begun: those whose sweep has begun in this process and has not been shown.
    """

    begun: ClassVar[list[SweepEnd]] = []

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._folder = Path(config.hydra.sweep.dir)
        SweepEnd.begun.append(self)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        SweepEnd.begun.remove(self)
        self.show(self._folder)

    def show(self, folder: Path) -> None:
        """Print and write what compares the jobs below a folder."""
        raise NotImplementedError


def show_what_ended() -> None:
    """After a sweep that was left: which jobs failed, and the table of the others."""
    while SweepEnd.begun:
        sweep = SweepEnd.begun.pop()
        for path in sorted(sweep._folder.glob(f"*/{FAILURE_FILE}")):
            failure = json.loads(path.read_text())
            print(f"Job {path.parent.name} failed ({' '.join(failure['overrides'])}): {failure['error']}")
        sweep.show(sweep._folder)


def keep_failure(folder: Path, overrides: Sequence[str], error: BaseException) -> None:
    """Leave in a job's folder, whose process may be another, why it failed."""
    words = str(error).strip().splitlines()
    content = {"overrides": list(overrides), "error": f"{type(error).__name__}: {words[0] if words else ''}"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FAILURE_FILE).write_text(json.dumps(content, indent=2) + "\n")


class SweepTable(SweepEnd):
    """Compares the runs of a sweep, whatever the launcher, once all have ended."""

    def show(self, folder: Path) -> None:
        from embodix.report.comparison_table import print_sweep

        print_sweep(folder)


class EvaluationTable(SweepEnd):
    """Shows the evaluations of a sweep as one, since their episodes are the same: a table and a page."""

    def show(self, folder: Path) -> None:
        from embodix.report.evaluation import read_evaluation
        from embodix.report.evaluation_page import EvaluatedFolder, print_evaluations, render_evaluations

        evaluated = []
        for path in sorted(folder.glob("*/results.json")):
            evaluation = read_evaluation(path)
            assert evaluation is not None
            named = dataclasses.replace(evaluation, name=f"{path.parent.name}_{evaluation.name}")
            evaluated.append(EvaluatedFolder(named, path.parent.name))
        if len(evaluated) > 1:
            print_evaluations([item.evaluation for item in evaluated])
            page = folder / "results.html"
            page.write_text(render_evaluations(evaluated, folder))
            print(f"Page of all: {page}")


class QuantizationTable(SweepEnd):
    """Shows what the jobs of a sweep of ``lerobot quantize`` save beside each other."""

    def show(self, folder: Path) -> None:
        from embodix.report.quantization_page import print_quantizations

        records = {}
        for path in sorted(folder.glob("*/quantize.json"), key=lambda path: path.parent.name):
            record = json.loads(path.read_text())
            varied = [word for word in record["overrides"] if not word.startswith(("checkpoint=", "output="))]
            records[f"{path.parent.name}: {' '.join(varied)}"] = record
        if records:
            print_quantizations(records)
