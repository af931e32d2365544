# SPDX-License-Identifier: Apache-2.0
"""Whether values can be computed with and episodes have something to teach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lerobot.utils.constants import ACTION, OBS_STATE

from embodix.checks.catalogue import found
from embodix.checks.column_figures import ColumnFigures
from embodix.checks.column_reading import TableRows
from embodix.checks.dataset_tables import TASKS_COLUMN, DatasetTables
from embodix.checks.findings import Finding, Location
from embodix.checks.run_needs import RunNeeds

LEAVE_OUT = "Leave these episodes out by dataset.episodes=[...], or record them again."


def value_findings(key: str, width: int, figures: ColumnFigures, needed: bool) -> Iterator[Finding]:
    """Of one key.

    Args:
        width: that the metadata say.
        needed: whether the policy reads it; values that nobody reads are worth a warning, but every key is collated.
    """
    if figures.num_null:
        yield found("null_values", key, f"{figures.num_null} values are missing", LEAVE_OUT)
    if figures.num_rows and figures.width != width:
        yield found(
            "shape_differs",
            key,
            f"meta/info.json says {width} dimensions, the rows have {figures.width}",
            "Correct the shape there, or record again.",
        )
    if figures.first_not_finite is not None:
        total, of_dimension = sum(figures.num_not_finite), [n for n in figures.num_not_finite if n]
        yield found(
            "not_finite",
            key,
            f"{total} values in {len(of_dimension)} of {figures.width} dimensions are NaN or infinite",
            LEAVE_OUT,
            figures.first_not_finite,
            severity=None if needed else "warning",
        )


def episode_findings(
    tables: DatasetTables, rows: TableRows, figures: Mapping[str, ColumnFigures], needs: RunNeeds
) -> Iterator[Finding]:
    """Of lengths, motion and instructions."""
    yield from _short(rows, needs)
    num_episodes = int((rows.ends_R - rows.starts_R > 1).sum())
    names = {needs.rename_map.get(key, key): key for key in figures}
    for wanted, kind in ((OBS_STATE, "no_motion"), (ACTION, "action_constant")):
        key = names.get(wanted)
        own = figures[key] if key is not None else None
        if key is None or own is None or not own.num_still:
            continue
        whole = own.num_still == num_episodes
        what = "every episode" if whole else f"{own.num_still} of {num_episodes} episodes"
        named = (
            "" if whole else f": {', '.join(map(str, own.still))}{', ...' if own.num_still > len(own.still) else ''}"
        )
        yield found(
            kind,
            key,
            f"never changes in {what}{named}",
            LEAVE_OUT,
            Location(episode=own.still[0]),
            severity="error" if whole and kind == "action_constant" else "warning",
        )
    if needs.language:
        yield from _instructions(tables, needs)


def _short(rows: TableRows, needs: RunNeeds) -> Iterator[Finding]:
    lengths = rows.ends_R - rows.starts_R
    short = lengths < needs.chunk
    if short.any():
        first = int(rows.episode_N[rows.starts_R[short][0]])
        yield found(
            "episode_short",
            "episodes",
            f"{int(short.sum())} of {len(lengths)} are shorter than a chunk of "
            f"{needs.chunk} actions (shortest: {int(lengths.min())} frames)",
            "Train with action_pad=mask, a smaller policy.chunk_size, or leave them out by dataset.episodes.",
            Location(episode=first),
        )


def _instructions(tables: DatasetTables, needs: RunNeeds) -> Iterator[Finding]:
    told = {row: [str(task) for task in tables.episodes[TASKS_COLUMN][row]] for row in tables.rows_of_episodes}
    empty = [row for row, tasks in told.items() if not any(task.strip() for task in tasks)]
    if empty:
        yield found(
            "instruction_empty",
            "task",
            f"is empty in {len(empty)} of {len(told)} episodes",
            "Write what is to be done into meta/tasks.parquet, or record again with a `task` in every frame.",
            Location(episode=int(tables.episodes["episode_index"][empty[0]])),
            severity="error" if len(empty) == len(told) else "warning",
        )
    if needs.prompt_length is None or needs.max_prompt is None:
        return
    lengths = {index: needs.prompt_length(task) for index, task in tables.tasks.items()}
    longest = max(lengths, key=lengths.__getitem__, default=None)
    if longest is not None and lengths[longest] > needs.max_prompt:
        many = sum(length > needs.max_prompt for length in lengths.values())
        yield found(
            "instruction_long",
            "task",
            f"{many} of {len(lengths)} instructions need up to {lengths[longest]} tokens, "
            f"the policy reads {needs.max_prompt}: {tables.tasks[longest][:60]!r}",
            f"Raise policy.tokenizer_max_length to {lengths[longest]}, or shorten the instruction; state and "
            "closing word are kept, the task's end is not.",
        )
