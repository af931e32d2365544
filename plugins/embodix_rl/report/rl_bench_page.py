# SPDX-License-Identifier: Apache-2.0
"""A bench of `lerobot rl` for a reader: one self-contained HTML page, JSON, and a table in the terminal."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape
from rich.console import Console
from rich.table import Table

from embodix.report.manifest import write_text_atomically
from embodix.report.page import HTML_NAME, Card, Page, colour, provenance_rows
from embodix.report.runs import Run
from embodix.report.words import count, percent, ratio
from embodix_rl.report import rl_bench_plots as plots
from embodix_rl.report.rl_bench import BenchReport, VariantResult
from embodix_rl.report.spans import COMPONENTS

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
DECLARED = (
    "The times of environment steps, inference and training were declared. Rates are those of a schedule, not of a "
    "simulator, a policy or a machine."
)
FEW_STEPS = 3
GLOSSARY = {
    "frame": "An action step of one environment. A frame is fresh the first time that it is trained on; optimizer "
    "steps on frames that were used before are not counted as throughput.",
    "reuse": "Frames trained on for each fresh one. 1 where every frame is trained on once.",
    "discarded": "Of the frames of trajectories that were finished in time, those that no step trained on.",
    "staleness": "Policy versions between the policy that acted and the one that is trained.",
    "bound": "What the slowest component would allow if all others overlapped with it completely: a component's "
    "seconds a frame, the least that any variant with the same baseline needed; the largest of the three.",
    "waits for": "What an idle worker needs next and was under way: environments need actions, then training, which "
    "may hold generation back, then each other; inference needs environments; training needs both. Messages and "
    "scheduling: nothing of these was under way.",
    "scheduling model": "The schedule on a virtual clock with the declared times, without processes: a prediction made "
    "before the run.",
}


def write_bench(report: BenchReport, folder: Path | str) -> None:
    """Write ``results.json`` and ``report.html`` into the folder of the bench."""
    folder = Path(folder)
    record = bench_record(report)
    write_text_atomically(folder / RESULTS_NAME, json.dumps(record, indent=2, allow_nan=False) + "\n")
    write_text_atomically(folder / HTML_NAME, render_bench(report))


def render_bench(report: BenchReport) -> str:
    """The page as text. Without a finished variant it lists the failures."""
    results = report.results
    commands = [(result.name, _command(result.entry.overrides)) for result in results]
    page = Page(
        title=report.title,
        paragraph=_paragraph(report),
        provenance=[*provenance_rows([_run_of(result) for result in results]), *commands],
        cards=_cards(report),
        warnings=_warnings(report),
        figures=_figures(report) if results else {},
        details=[
            (f"Configuration of {result.name}", json.dumps(result.manifest.config, indent=2)) for result in results
        ],
        glossary=GLOSSARY,
    )
    return page.render(
        "rl_bench.html.j2",
        package="embodix_rl.report",
        filters={"breakable": _breakable},
        rows=_table_rows(report),
        paper_source=report.paper_source,
        waiting=_waiting_rows(report),
        timelines=_timelines(report) if results else [],
        failures=report.failures,
    )


def _run_of(result: VariantResult) -> Run:
    return Run(result.name, result.entry.folder, result.manifest, [], None)


def _command(overrides: Sequence[str]) -> Markup:
    return Markup("<code>lerobot rl {}</code>").format(" ".join(overrides))


def _breakable(name: str) -> Markup:
    """A name that may go on in another line after an underscore."""
    return escape(name).replace("_", Markup("_<wbr>"))


def _figures(report: BenchReport) -> dict[str, str | None]:
    return {
        "rates": plots.rates_figure(report),
        "shares": plots.shares_figure(report),
        "staleness": plots.staleness_figure(report),
        "progress": plots.progress_figure(report),
        "legend": plots.gantt_legend(),
    }


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
        "warnings": _warnings(report),
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
    rows = _table_rows(report)
    columns = {name: title for name, title in _COLUMNS.items() if any(row[name] for row in rows)}
    table = Table(title=report.title, title_justify="left")
    table.add_column("variant", overflow="fold", min_width=12)
    for title in columns.values():
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(row["name"], *(row[name] for name in columns))
    console.print(table)
    for warning in _warnings(report):
        console.print(f"[yellow]Mind:[/] {warning}", highlight=False)


def _paragraph(report: BenchReport) -> str:
    """One paragraph for a reader who was not there."""
    if not report.results:
        return "No variant finished."
    config = report.results[0].manifest.config
    sizes = report.results[0].manifest.settings["sizes"]
    frames = sizes["num_envs"] * sizes["rollout_epochs"] * sizes["steps_per_epoch"]
    return (
        f"{count(len(report.results), 'schedule')} of the same work ran one after another, each in processes "
        f"of its own: policy {config['policy'].get('type')}, environment {config['env'].get('type')}, "
        f"{count(sizes['num_envs'], 'environment')} in "
        f"{count(sizes['env_workers'], 'worker')}, {frames} frames a rollout. The first "
        f"{count(report.results[0].warmup_steps, 'training step')} of each run are left out of rates and times."
    )


def _warnings(report: BenchReport) -> list[str]:
    """What a reader must know before the figures."""
    found = [DECLARED] if report.declared_latency else []
    found += [f"{entry.name} {entry.failure}; its last lines are below." for entry in report.failures]
    few = [result.name for result in report.results if result.rates.num_steps < FEW_STEPS]
    if few:
        found.append(
            f"Rates of {', '.join(few)} rest on fewer than {FEW_STEPS} training steps; raise rl.steps for figures to "
            "quote."
        )
    reused = [result.name for result in report.results if result.entry.reused]
    if reused:
        found.append(f"Finished by an earlier bench with the same config and not run again: {', '.join(reused)}.")
    commits = {result.manifest.provenance.commit for result in report.results}
    if len(commits) > 1:
        found.append("The variants ran different commits of embodix; see where the figures come from.")
    return found


def _cards(report: BenchReport) -> list[Card]:
    """The findings: the best variant against each baseline."""
    found = []
    for baseline in (result for result in report.results if result.entry.baseline is None):
        rivals = [result for result in report.results if result.entry.baseline == baseline.name]
        if rivals:
            found += _best_cards(baseline, max(rivals, key=lambda result: result.rates.fresh_frames_per_s))
    return found


def _best_cards(baseline: VariantResult, best: VariantResult) -> list[Card]:
    own, other = best.rates.fresh_frames_per_s, baseline.rates.fresh_frames_per_s
    bound = f"The bound of the parts is {best.bound_frames_per_s:.1f} frames a second"
    return [
        Card(
            f"{best.name} against {baseline.name}",
            ratio(best.ratio),
            f"{own:.1f} fresh frames a second, {baseline.name} {other:.1f}; the fastest of its variants.",
            colour(own > other) if best.ratio is not None and math.isfinite(best.ratio) else "plain",
        ),
        Card(
            f"{best.name}, of the bound",
            percent(best.bound_share),
            f"{bound}; {baseline.name} reaches {percent(baseline.bound_share)} of it.",
            "good" if math.isfinite(best.bound_share) else "plain",
        ),
    ]


def _table_rows(report: BenchReport) -> list[dict[str, Any]]:
    """One row a variant, with cells as text."""
    return [
        {
            "name": result.name,
            "baseline": result.entry.baseline,
            "fresh": f"{result.rates.fresh_frames_per_s:.1f}",
            "ratio": ratio(result.ratio) if result.ratio else "",
            "predicted": ratio(result.predicted_ratio) if result.predicted_ratio else "",
            "paper": ratio(result.entry.paper_ratio) if result.entry.paper_ratio else "",
            "bound": percent(result.bound_share),
            "trained": f"{result.rates.trained_frames_per_s:.1f}",
            "reuse": f"{result.rates.reuse:.2f}",
            "discarded": percent(result.discarded_share, 1),
            "mean_age": f"{_mean_age(result):.2f}",
            "largest_age": str(max(result.rates.staleness, default=0)),
            "num_steps": str(result.rates.num_steps),
            "seconds": f"{result.rates.seconds:.0f}",
        }
        for result in report.results
    ]


def _mean_age(result: VariantResult) -> float:
    """In policy versions."""
    return math.fsum(age * share for age, share in result.rates.staleness.items())


def _waiting_rows(report: BenchReport) -> list[dict[str, Any]]:
    """One row a variant and component: seconds a frame, its own work, weights, and what it waited for."""
    rows = []
    for result in report.results:
        for place, component in enumerate(COMPONENTS.values()):
            own = result.components.get(component, {})
            waits = {label.removeprefix("waits for "): share for label, share in own.items() if "waits for" in label}
            rows.append(
                {
                    "variant": "" if place else result.name,
                    "component": component,
                    "milliseconds": f"{1000 * result.parts_s[component]:.2f}",
                    "work": percent(1 - sum(waits.values()) - own.get("weights", 0.0)),
                    "weights": percent(own.get("weights", 0.0), 1),
                    "waits": ", ".join(
                        f"{percent(share)} {whom}"
                        for whom, share in sorted(waits.items(), key=lambda item: -item[1])
                        if share >= 0.005
                    ),
                }
            )
    return rows
