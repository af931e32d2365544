# SPDX-License-Identifier: Apache-2.0
"""The report of a check: a table on the terminal, JSON, and a page."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from embodix.checks.catalogue import KINDS
from embodix.checks.findings import CheckReport, Finding, KeyFigures
from embodix.report.manifest import collect_provenance, write_text_atomically
from embodix.report.page import HTML_NAME, Card, Page, colour, known_provenance
from embodix.report.words import percent

JSON_NAME = "check.json"


def report_json(report: CheckReport) -> str:
    """The report as JSON."""
    return json.dumps(dataclasses.asdict(report), indent=2, ensure_ascii=False) + "\n"


def write_check(report: CheckReport, folder: Path) -> Path:
    """Write JSON and page, and return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(folder / JSON_NAME, report_json(report))
    page = folder / HTML_NAME
    write_text_atomically(page, render_check(report))
    return page


def render_check(report: CheckReport) -> str:
    """The page as text."""
    page = Page(
        title=f"Check of {report.dataset}",
        paragraph=f"{report.verdict} Every numeric column was read"
        + (f"; of the images {report.images}." if report.images else "; no image was looked at."),
        provenance=known_provenance(dataclasses.asdict(collect_provenance())),
        cards=[
            Card(
                "Errors", str(len(report.errors)), "what makes training wrong or impossible", colour(not report.errors)
            ),
            Card("Warnings", str(len(report.warnings)), "what costs quality", "plain"),
            Card("Frames", str(report.num_frames), f"{report.num_episodes} episodes", "plain"),
        ],
    )
    return page.render("check.html.j2", package="embodix.checks", report=report, kinds=KINDS, rows=key_rows(report))


def key_rows(report: CheckReport) -> list[tuple[KeyFigures, str]]:
    """Each key with its verdict in words."""
    return [(row, _verdict([f for f in report.findings if _owns(row, f)])) for row in report.keys]


def _owns(row: KeyFigures, finding: Finding) -> bool:
    return (row.dataset, row.key) == (finding.dataset, finding.key)


def _verdict(findings: list[Finding]) -> str:
    return ", ".join(dict.fromkeys(finding.kind for finding in findings)) or "sound"


def print_check(report: CheckReport, console: Console) -> None:
    """Print the table of keys, and each finding with what to do."""
    console.print(f"[bold]{report.verdict}[/]", highlight=False, soft_wrap=True)
    table = Table(title="Keys, as the policy is given them", title_justify="left")
    table.add_column("key", no_wrap=True)
    table.add_column("width", justify="right")
    table.add_column("scaled by")
    for column in ("outside\nq01-q99", "largest\nvalue"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for row, verdict in key_rows(report):
        table.add_row(*_cells(row), verdict, style=None if verdict == "sound" else "bold")
    if report.keys:
        console.print(table)
    for finding in report.findings:
        style = "red" if finding.severity == "error" else "yellow"
        console.print(f"[{style}]{finding.severity}[/] ", end="")
        console.print(finding.sentence, markup=False, highlight=False, soft_wrap=True)


def _cells(row: KeyFigures) -> list[str]:
    name = f"{row.dataset}: {row.key}" if row.dataset else row.key
    outside = "" if row.outside is None else percent(row.outside, 1)
    largest = "" if row.largest is None else f"{row.largest:.3g}"
    return [name, str(row.width), row.normalisation or "-", outside, largest]
