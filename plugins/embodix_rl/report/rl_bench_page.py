# SPDX-License-Identifier: Apache-2.0
"""A bench of `lerobot rl` as one self-contained HTML page, as JSON and as a table in the terminal."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape
from rich.console import Console
from rich.table import Table

from embodix.report.html import markup_of, page_environment, provenance_rows
from embodix.report.manifest import write_text_atomically
from embodix.report.runs import Run
from embodix.report.write import HTML_NAME
from embodix_rl.report import rl_bench_plots as plots
from embodix_rl.report import rl_bench_wording as wording
from embodix_rl.report.rl_bench import BenchReport, VariantResult

RESULTS_NAME = "results.json"
_COLUMNS = {
    "fresh": "fresh/s",
    "ratio": "ratio",
    "predicted": "model",
    "paper": "paper",
    "bound": "of the bound",
    "reuse": "reuse",
    "discarded": "unused",
    "mean_age": "stale",
}


def write_bench(report: BenchReport, folder: Path | str) -> None:
    """Write ``results.json`` and ``report.html`` into the folder of the bench."""
    folder = Path(folder)
    record = bench_record(report)
    write_text_atomically(folder / RESULTS_NAME, json.dumps(record, indent=2, allow_nan=False) + "\n")
    write_text_atomically(folder / HTML_NAME, render_bench(report))


def render_bench(report: BenchReport) -> str:
    """The page as text. Without a finished variant it lists the failures."""
    runs = [Run(result.name, result.entry.folder, result.manifest, [], None) for result in report.results]
    environment = page_environment("embodix_rl.report")
    environment.filters |= {"breakable": _breakable}
    return environment.get_template("rl_bench.html.j2").render(
        title=report.title,
        paragraph=wording.what_was_run(report),
        warnings=wording.warnings(report),
        cards=wording.cards(report),
        rows=wording.table_rows(report),
        paper_source=report.paper_source,
        waiting=wording.waiting_rows(report),
        figures=_figures(report) if report.results else {},
        timelines=_timelines(report) if report.results else [],
        failures=report.failures,
        overrides=[(result.name, " ".join(result.entry.overrides)) for result in report.results],
        provenance=provenance_rows(runs),
        configs=[(result.name, json.dumps(result.manifest.config, indent=2)) for result in report.results],
        glossary=wording.GLOSSARY,
    )


def _breakable(name: str) -> Markup:
    """A name that may go on in another line after an underscore."""
    return escape(name).replace("_", Markup("_<wbr>"))


def _figures(report: BenchReport) -> dict[str, Markup | None]:
    drawn = {
        "rates": plots.rates_figure(report),
        "shares": plots.shares_figure(report),
        "staleness": plots.staleness_figure(report),
        "progress": plots.progress_figure(report),
        "legend": plots.gantt_legend(),
    }
    return markup_of(drawn)


def _timelines(report: BenchReport) -> list[tuple[str, Markup]]:
    seconds = plots.timeline_window(report)
    return [
        (result.name, Markup(plots.gantt_figure(result, seconds, f"timeline-{number}")))
        for number, result in enumerate(report.results)
    ]


def bench_record(report: BenchReport) -> dict[str, Any]:
    """The report as plain containers."""
    return {
        "title": report.title,
        "declared_latency": report.declared_latency,
        "warnings": wording.warnings(report),
        "variants": {result.name: _variant_record(result) for result in report.results},
        "failures": {
            entry.name: {"overrides": entry.overrides, "failure": entry.failure, "last_lines": entry.last_lines}
            for entry in report.failures
        },
        "paper_source": report.paper_source,
        "provenance": {result.name: dataclasses.asdict(result.manifest.provenance) for result in report.results},
    }


def _variant_record(result: VariantResult) -> dict[str, Any]:
    rates = dataclasses.asdict(result.rates)
    return {
        "overrides": result.entry.overrides,
        "baseline": result.entry.baseline,
        "ratio": result.ratio,
        "predicted_ratio": result.predicted_ratio,
        "predicted_frames_per_s": result.entry.predicted_frames_per_s,
        "paper_ratio": result.entry.paper_ratio,
        **rates,
        "staleness": {str(age): share for age, share in result.rates.staleness.items()},
        "discarded_share": result.discarded_share,
        "parts_s_a_frame": result.parts_s,
        "bound_frames_per_s": result.bound_frames_per_s,
        "bound_share": result.bound_share,
        "time_of_components": result.components,
        "time_of_workers": result.shares,
        "progress": {
            label: [{"fresh_frames": frames, "seconds": seconds, "value": value} for frames, seconds, value in points]
            for label, points in result.progress().items()
        },
        "reused": result.entry.reused,
    }


def print_bench(report: BenchReport, console: Console | None = None) -> None:
    """The table, and what the reader must mind."""
    console = console or Console()
    rows = wording.table_rows(report)
    columns = {name: title for name, title in _COLUMNS.items() if any(row[name] for row in rows)}
    table = Table(title=report.title, title_justify="left")
    table.add_column("variant", overflow="fold", min_width=12)
    for title in columns.values():
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(row["name"], *(row[name] for name in columns))
    console.print(table)
    for warning in wording.warnings(report):
        console.print(f"[yellow]Mind:[/] {warning}", highlight=False)
