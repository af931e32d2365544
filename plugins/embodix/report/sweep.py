# SPDX-License-Identifier: Apache-2.0
"""End a Hydra multirun in one comparison of its runs, whatever the launcher."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import yaml
from rich.console import Console

from embodix.report.compare import CompareReport, compare_runs
from embodix.report.runs import Run, read_run
from embodix.report.table import print_comparison
from embodix.report.write import HTML_NAME, write_report


def print_sweep(folder: Path | str, console: Console | None = None) -> CompareReport | None:
    """Compare all runs below a sweep's folder, print the table and write the report beside them.

    Returns:
        the report, or None where fewer than two runs ended; a line then says so.
    """
    console = console or Console()
    runs = read_sweep(folder)
    if len(runs) < 2:
        console.print(f"No comparison: a table needs two runs or more, and {folder} holds {len(runs)} finished.")
        return None
    report = compare_runs(runs, title="Sweep")
    write_report(report, folder)
    print_comparison(report, console)
    console.print(f"Report: {Path(folder) / HTML_NAME}", highlight=False, soft_wrap=True)
    return report


def read_sweep(folder: Path | str) -> list[Run]:
    """The finished runs below ``folder`` in the order of their job numbers, named by what was swept."""
    manifests = [path for path in Path(folder).rglob("manifest.json") if (path.parent / "steps.jsonl").is_file()]
    runs = [read_run(path.parent) for path in sorted(manifests, key=_natural_order)]
    overrides = [_overrides(run.folder, Path(folder)) for run in runs]
    shared = set.intersection(*map(set, overrides)) if overrides else set()
    named = [" ".join(o for o in own if o not in shared) or run.name for run, own in zip(runs, overrides, strict=True)]
    return [
        dataclasses.replace(run, name=name if named.count(name) == 1 else f"{name} ({_job(run.folder, Path(folder))})")
        for run, name in zip(runs, named, strict=True)
    ]


def _overrides(run_folder: Path, sweep_folder: Path) -> list[str]:
    """The overrides that Hydra recorded for the job this run belongs to; empty where it recorded none."""
    for folder in (run_folder, *run_folder.parents):
        recorded = folder / ".hydra" / "overrides.yaml"
        if recorded.is_file():
            return [str(override) for override in yaml.safe_load(recorded.read_text()) or []]
        if folder == sweep_folder:
            break
    return []


def _job(run_folder: Path, sweep_folder: Path) -> str:
    return run_folder.relative_to(sweep_folder).parts[0]


def _natural_order(path: Path) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in path.parts]
