# SPDX-License-Identifier: Apache-2.0
"""Evaluations in the terminal: success of each task, controls under it, pairs beneath."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from embodix.report.evaluation import EpisodeRecord, Evaluation, SuccessRate, distinct_controls, pair_success
from embodix.report.evaluation_wording import pair_sentence, warnings
from embodix.report.wording import success_words


def print_evaluations(evaluations: Sequence[Evaluation], console: Console | None = None) -> None:
    """Print the table, the pairs against the first evaluation, and what the reader must mind."""
    console = console or Console()
    console.print(evaluation_table(evaluations))
    for variant in evaluations[1:]:
        pair = pair_success(evaluations[0], variant)
        if pair is not None:
            console.print(pair_sentence(evaluations[0], variant, pair), highlight=False, soft_wrap=True)
    for warning in warnings(evaluations):
        console.print(f"[yellow]Mind:[/] {warning}", highlight=False, soft_wrap=True)


def evaluation_table(evaluations: Sequence[Evaluation]) -> Table:
    """A block of rows for each task, and one for all: each evaluation followed by its controls."""
    actors: list[tuple[str, Sequence[EpisodeRecord], str]] = []
    for evaluation, controls in zip(evaluations, distinct_controls(evaluations), strict=True):
        actors.append((evaluation.name, evaluation.episodes, ""))
        for name, episodes in controls.items():
            actors.append((f"  {name.replace('_', ' ')}", episodes, "dim"))
    table = Table(title="Episodes solved, with the 95 % Wilson interval", title_justify="left")
    table.add_column("task", overflow="fold")
    table.add_column("actor", overflow="fold")
    table.add_column("solved", justify="right", no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    tasks = list(dict.fromkeys(episode.task for _, episodes, _ in actors for episode in episodes))
    for task in tasks:
        _add_block(table, task, [(n, [e for e in of_all if e.task == task], style) for n, of_all, style in actors])
    if len(tasks) > 1:
        _add_block(table, "all", actors)
    return table


def _add_block(table: Table, label: str, actors: Sequence[tuple[str, Sequence[EpisodeRecord], str]]) -> None:
    table.add_section()
    for name, episodes, style in actors:
        if not episodes:
            continue
        success = SuccessRate.of([episode.success for episode in episodes])
        steps = [episode.num_steps for episode in episodes if episode.num_steps is not None]
        length = f"{sum(steps) / len(steps):.0f}" if steps else ""
        table.add_row(label, name, success_words(success), length, style=style)
        label = ""
