# SPDX-License-Identifier: Apache-2.0
"""The table at the end of a Hydra multirun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf


class SweepTable(Callback):
    """Compares the runs of a sweep, whatever the launcher, once all have ended."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from embodix.report.compare import compare_runs
        from embodix.report.runs import read_run
        from embodix.report.table import print_comparison
        from embodix.report.write import write_report

        folder = Path(config.hydra.sweep.dir)
        jobs = sorted((path.parent.parent for path in folder.glob("*/run/manifest.json")), key=_job_number)
        if len(jobs) < 2:
            return
        names = distinguishing_names([_overrides_of(job) for job in jobs])
        runs = [read_run(job / "run", name) for job, name in zip(jobs, names, strict=True)]
        report = compare_runs(runs, title=f"Sweep of {len(runs)} runs")
        write_report(report, folder)
        print_comparison(report)
        print(f"Report: {folder / 'report.html'}")


def distinguishing_names(overrides_of_jobs: list[list[str]]) -> list[str]:
    """A name a job: the overrides it does not share with all others, numbered where two jobs are alike."""
    shared = set.intersection(*(set(overrides) for overrides in overrides_of_jobs))
    names = [
        " ".join(override.lstrip("+") for override in overrides if override not in shared) or "run"
        for overrides in overrides_of_jobs
    ]
    return [f"{name} #{index}" if names.count(name) > 1 else name for index, name in enumerate(names)]


def _overrides_of(job: Path) -> list[str]:
    return [str(override) for override in OmegaConf.load(job / ".hydra" / "overrides.yaml")]


def _job_number(job: Path) -> tuple[int, str]:
    return (int(job.name), "") if job.name.isdigit() else (0, job.name)
