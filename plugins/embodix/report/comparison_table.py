# SPDX-License-Identifier: Apache-2.0
"""A comparison in the terminal: one rich table and a line of verdict for every variant; also at the end of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from embodix.report.compare import CompareReport, compare_runs
from embodix.report.comparison_page import loss_difference, verdict_line, write_report
from embodix.report.page import HTML_NAME
from embodix.report.ranks import RanksSummary
from embodix.report.runs import VariantSummary, read_sweep
from embodix.report.steps import PHASES
from embodix.report.words import PHASE_NAMES, memory, percent, quantity, ratio, success_words

_SHORT_LIST = (
    *("speed ratio", "FLOP bound", "samples/s, wall clock", "final loss", "largest loss difference", "success"),
    *("parameters cut, a rank", "optimizer state, a rank", "exchanged a step"),
)


def print_comparison(report: CompareReport, console: Console | None = None) -> None:
    """Print the table, the verdicts and whatever the reader must mind."""
    console = console or Console()
    console.print(comparison_table(report))
    for pair in report.pairs:
        console.print(verdict_line(report, pair), highlight=False)
    for warning in report.warnings:
        console.print(f"[yellow]Mind:[/] {warning}", highlight=False)


def comparison_table(report: CompareReport) -> Table:
    """Figures down and variants across; the other way round, and fewer figures, for more than three variants."""
    rows = [row for row in comparison_rows(report) if row[0] is None or any(row[1])]
    if len(report.variants) > 3:
        return _wide_table(report, [(label, cells) for label, cells in rows if label in _SHORT_LIST])
    table = Table(title=report.title, title_justify="left")
    table.add_column("")
    for variant in report.variants:
        table.add_column(variant.name, justify="right")
    for label, cells in rows:
        if label is None:
            table.add_section()
        else:
            table.add_row(label, *cells)
    return table


def _wide_table(report: CompareReport, columns: list[tuple[str | None, list[str]]]) -> Table:
    table = Table(title=report.title, title_justify="left")
    table.add_column("variant", overflow="fold")
    for label, _ in columns:
        table.add_column(label or "", justify="right")
    for index, variant in enumerate(report.variants):
        table.add_row(variant.name, *(cells[index] for _, cells in columns))
    return table


def comparison_rows(report: CompareReport) -> list[tuple[str | None, list[str]]]:
    pairs = {pair.name: pair for pair in report.pairs}

    def row(label: str, cell: object) -> tuple[str | None, list[str]]:
        return label, [str(cell(variant)) for variant in report.variants]  # type: ignore[operator]

    def speed(variant: VariantSummary) -> str:
        pair = pairs.get(variant.name)
        if pair is None:
            return "baseline"
        if pair.step_ratio is None:
            return "not measured"
        if not pair.same_samples:
            return f"{ratio(pair.samples_ratio)} a sample, other samples"
        spread = pair.step_ratio
        return f"{ratio(spread.median)} [{spread.low:.2f}, {spread.high:.2f}]"

    def bound(variant: VariantSummary) -> str:
        pair = pairs.get(variant.name)
        if pair is None or pair.bound is None:
            return ""
        real = pair.bound.real_size
        return ratio(pair.bound.this_size) + (f" (real size {ratio(real)})" if real else "")

    clock = "cpu_s" if report.pairs[0].clock.startswith("process") else "wall_s"
    separator: tuple[str | None, list[str]] = (None, [])
    rows = [
        row("packing", lambda v: v.packer or ""),
        row("attention", lambda v: v.attention or ""),
        row("matrix products in", lambda v: v.precision),
        separator,
        row("speed ratio", speed),
        row("FLOP bound", bound),
        row("samples/s, wall clock", lambda v: f"{v.samples_per_wall_s:.3g}"),
        separator,
        *(row(f"{PHASE_NAMES[p]}, ms", lambda v, p=p: f"{1000 * getattr(v, clock)[p]:.1f}") for p in PHASES),
        row("waiting for data, of wall clock", lambda v: percent(v.data_wait_share, 1)),
        separator,
        row("token utilisation", lambda v: percent(v.utilisation)),
        row("FLOPs a step", lambda v: quantity(v.flops_per_step)),
        row("peak memory", lambda v: memory(v.peak_memory_bytes)),
        row("action padding", lambda v: percent(v.action_pad_share)),
        separator,
        row("final loss", lambda v: f"{v.final_loss:.5g}"),
        row(
            "largest loss difference",
            lambda v: loss_difference(pairs[v.name]) if v.name in pairs else "",
        ),
    ]
    rows += [separator, *_rank_rows(report)] if any(variant.ranks for variant in report.variants) else []
    if any(variant.evaluation for variant in report.variants):
        rows.append(row("success", lambda v: success_words(v.evaluation.success) if v.evaluation else ""))
        for control in dict.fromkeys(c for v in report.variants if v.evaluation for c in v.evaluation.controls):
            rows.append(row(f"  {control.replace('_', '-')} control", lambda v, c=control: _control(v, c)))
    return rows


def _rank_rows(report: CompareReport) -> list[tuple[str | None, list[str]]]:
    """How each variant was spread; bytes of the rank that holds most."""

    def row(label: str, cell: Callable[[RanksSummary], str]) -> tuple[str | None, list[str]]:
        return label, ["" if variant.ranks is None else cell(variant.ranks) for variant in report.variants]

    return [
        row("strategy", lambda r: r.strategy),
        row("ranks", lambda r: f"{r.num_ranks}: {r.layout}"),
        row("parameters cut, a rank", lambda r: memory(r.cut_bytes)),
        row("parameters whole, a rank", lambda r: memory(r.whole_bytes)),
        row("optimizer state, a rank", lambda r: memory(r.optimizer_bytes)),
        row("exchanged a step", lambda r: "not counted" if r.exchanged_bytes is None else memory(r.exchanged_bytes)),
    ]


def _control(variant: VariantSummary, name: str) -> str:
    controls = variant.evaluation.controls if variant.evaluation else {}
    return success_words(controls[name]) if name in controls else ""


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
