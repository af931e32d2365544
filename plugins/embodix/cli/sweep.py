# SPDX-License-Identifier: Apache-2.0
"""The tables at the end of a Hydra multirun."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class SweepTable(Callback):
    """Compares the runs of a sweep, whatever the launcher, once all have ended."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from embodix.report.comparison_table import print_sweep

        print_sweep(config.hydra.sweep.dir)


class EvaluationTable(Callback):
    """Shows the evaluations of a sweep as one, since their episodes are the same: a table and a page."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from embodix.report.evaluation import read_evaluation
        from embodix.report.evaluation_page import EvaluatedFolder, print_evaluations, render_evaluations

        folder = Path(config.hydra.sweep.dir)
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


class QuantizationTable(Callback):
    """Shows what the jobs of a sweep of ``lerobot quantize`` save beside each other."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from embodix.report.quantization_page import print_quantizations

        records = {}
        for path in sorted(Path(config.hydra.sweep.dir).glob("*/quantize.json"), key=lambda path: path.parent.name):
            record = json.loads(path.read_text())
            varied = [word for word in record["overrides"] if not word.startswith(("checkpoint=", "output="))]
            records[f"{path.parent.name}: {' '.join(varied)}"] = record
        print_quantizations(records)
