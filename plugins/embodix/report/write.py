# SPDX-License-Identifier: Apache-2.0
"""From run folders to the files a reader opens: `report.json` and `report.html`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodix.report.compare import CompareReport, SpeedBound, compare_runs
from embodix.report.html import render_html
from embodix.report.manifest import write_text_atomically
from embodix.report.runs import read_variants
from embodix.report.wording import verdict_line, what_was_run

JSON_NAME, HTML_NAME = "report.json", "report.html"


def write_comparison(
    folder: Path | str,
    *,
    baseline: str | None = None,
    bounds: Mapping[str, SpeedBound] | None = None,
    num_warmup: int | None = None,
    title: str = "Comparison of training variants",
) -> CompareReport:
    """Compare the runs in ``<folder>/variants/`` and write both files into ``folder``.

    See :func:`embodix.report.compare.compare_runs` for the arguments.

    Raises:
        FileNotFoundError, ValueError: the runs are missing or cannot be compared; the message says why.
    """
    report = compare_runs(read_variants(folder), baseline=baseline, bounds=bounds, num_warmup=num_warmup, title=title)
    write_report(report, folder)
    return report


def write_report(report: CompareReport, folder: Path | str) -> None:
    """Write ``report.json`` and ``report.html``."""
    folder = Path(folder)
    write_text_atomically(folder / JSON_NAME, json.dumps(report_record(report), indent=2, allow_nan=False) + "\n")
    write_text_atomically(folder / HTML_NAME, render_html(report))


def report_record(report: CompareReport) -> dict[str, Any]:
    """The report as plain containers for strict JSON: NaN and infinities become null, series are kept by step."""
    record = {
        "title": report.title,
        "what_was_run": what_was_run(report),
        "baseline": report.baseline,
        "verdicts": {pair.name: verdict_line(report, pair) for pair in report.pairs},
        "warnings": report.warnings,
        "variants": [dataclasses.asdict(variant) for variant in report.variants],
        "pairs": [dataclasses.asdict(pair) for pair in report.pairs],
        "config_differences": report.config_differences,
        "provenance": {run.name: dataclasses.asdict(run.manifest.provenance) for run in report.runs},
        "loss": {run.name: {str(step.step): step.loss for step in run.steps} for run in report.runs},
    }
    return dict(_plain(record))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {" #".join(map(str, key)) if isinstance(key, tuple) else str(key): _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
