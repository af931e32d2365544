# SPDX-License-Identifier: Apache-2.0
"""Whether the rows are those that the metadata promise: totals, lengths, bounds, indices, tasks and time stamps.

N: rows, R: runs of rows of one episode.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from embodix.checks.catalogue import found
from embodix.checks.column_reading import TableRows, open_files, read_column
from embodix.checks.dataset_tables import (
    EPISODES,
    INFO,
    NUMBERED,
    READ_ERRORS,
    REPAIR,
    TASKS,
    DatasetTables,
    first_line,
)
from embodix.checks.findings import Finding, Location, Severity, relative_to

RENUMBER = "Let lerobot-edit-dataset or the recorder write the data set anew; its tables disagree."


def read_rows(tables: DatasetTables) -> tuple[TableRows, list[Finding]]:
    """Which rows there are, and what is wrong with their numbers."""
    findings: list[Finding] = list(_missing_files(tables))
    files: list[Path] = []
    for opened in open_files(tables):
        if isinstance(opened, Path):
            files.append(opened)
        else:
            findings.append(opened)
    rows = TableRows(files=files)
    if not files:
        findings += [] if findings else [found("file_missing", "data", "holds no Parquet file", REPAIR)]
        return rows, findings
    try:
        columns = {key: read_column(files, key) for key in ("episode_index", "frame_index", "index")}
    except (*READ_ERRORS, ValueError, KeyError) as error:
        findings.append(found("column_missing", "episode_index", f"can't be read: {first_line(error)}", REPAIR))
        rows.files = []
        return rows, findings
    if missing := [key for key, column in columns.items() if column.num_null]:
        findings += [found("null_values", key, "has rows without a value", REPAIR) for key in missing]
        rows.files = []
        return rows, findings
    numbers = {key: column.values_ND[:, 0] for key, column in columns.items()}
    findings += _total_findings(tables, numbers["episode_index"])
    if tables.selected is not None:
        rows.used = np.isin(numbers["episode_index"], np.asarray(list(tables.selected)))
        numbers = {key: values[rows.used] for key, values in numbers.items()}
    rows.episode_N, rows.frame_N = numbers["episode_index"], numbers["frame_index"]
    if len(rows.episode_N):
        changes = np.flatnonzero(np.diff(rows.episode_N)) + 1
        rows.starts_R = np.concatenate([[0], changes])
        rows.ends_R = np.concatenate([changes, [len(rows.episode_N)]])
    return rows, [*findings, *_episode_findings(tables, rows, numbers["index"]), *_time_findings(tables, rows)]


def _missing_files(tables: DatasetTables) -> Iterator[Finding]:
    for row in tables.rows_of_episodes:
        file = tables.data_file_of(row)
        if not file.is_file():
            place = Location(episode=int(tables.episodes["episode_index"][row]), file=relative_to(tables.root, file))
            yield found("file_missing", "data", "does not exist", REPAIR, place)
            return


def _total_findings(tables: DatasetTables, episode_N: np.ndarray) -> Iterator[Finding]:
    counted: dict[str, tuple[int, str, Severity]] = {
        "total_episodes": (len(tables.episodes["episode_index"]), f"episodes in {EPISODES}", "error"),
        "total_tasks": (len(tables.tasks), f"tasks in {TASKS}", "warning"),
    }
    if tables.selected is None:  # of some episodes, only their files need be here
        counted["total_frames"] = (len(episode_N), "rows", "error")
    for name, (number, of_what, severity) in counted.items():
        if tables.info[name] != number:
            remedy = f"Write {number} there, if the tables are right; else take a complete copy."
            got = f"{name} is {tables.info[name]}, but there are {number} {of_what}"
            yield found("totals_differ", INFO, got, remedy, severity=severity)


def _episode_findings(tables: DatasetTables, rows: TableRows, index_N: np.ndarray) -> Iterator[Finding]:
    numbers = rows.episode_N[rows.starts_R]
    if len(np.unique(numbers)) < len(numbers):
        again = _first_repeated(numbers)
        yield found(
            "episode_split",
            "episode_index",
            f"the rows of an episode lie apart or two episodes share a number "
            f"({len(numbers)} runs, {len(np.unique(numbers))} numbers)",
            RENUMBER,
            Location(episode=again),
        )
        return
    yield from _length_findings(tables, rows)
    wrong = rows.frame_N - (np.arange(len(rows.frame_N)) - np.repeat(rows.starts_R, rows.ends_R - rows.starts_R))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        yield found(
            "frame_index_gap",
            "frame_index",
            f"{int((wrong != 0).sum())} rows are not counted from 0",
            RENUMBER,
            rows.place(row),
        )
    if rows.used is None and (index_N != np.arange(len(index_N))).any():
        row = int(np.flatnonzero(index_N != np.arange(len(index_N)))[0])
        yield found("index_gap", "index", f"row {row} has index {int(index_N[row])}", RENUMBER, rows.place(row))


def _first_repeated(numbers: np.ndarray) -> int:
    seen: set[int] = set()
    for number in numbers.tolist():
        if number in seen:
            return int(number)
        seen.add(number)
    raise AssertionError("no number is repeated")


def _length_findings(tables: DatasetTables, rows: TableRows) -> Iterator[Finding]:
    """Of the episode table against the rows: the first of each kind."""
    first_row = dict(zip(rows.episode_N[rows.starts_R].tolist(), rows.starts_R.tolist(), strict=True))
    counts = dict(zip(rows.episode_N[rows.starts_R].tolist(), (rows.ends_R - rows.starts_R).tolist(), strict=True))
    used = set(tables.rows_of_episodes)
    numbers: list[Finding] = []
    lengths: list[Finding] = []
    bounds: list[Finding] = []
    next_start = 0
    for row, values in enumerate(zip(*(tables.episodes[name] for name in NUMBERED), strict=True)):
        number, length, start, end = map(int, values)
        if number != row and not numbers:
            got = f"has episode {number} in row {row}"
            numbers.append(found("episode_numbers", EPISODES, got, RENUMBER, Location(episode=number)))
        if row in used:
            if rows.used is None:
                next_start = first_row.get(number, next_start)
            num_rows, place = counts.pop(number, 0), Location(episode=number)
            if length != num_rows:
                got = f"says {length} frames, the table has {num_rows} rows"
                lengths.append(found("length_differs", EPISODES, got, RENUMBER, place))
            if (start, end) != (next_start, next_start + num_rows):
                got = f"bounds its rows by {start} and {end}; they are {next_start} to {next_start + num_rows}"
                bounds.append(found("bounds_differ", EPISODES, got, RENUMBER, place))
        next_start = end
    for number, num_rows in counts.items():
        got = f"has no such episode, the table has {num_rows} rows of it"
        lengths.append(found("length_differs", EPISODES, got, RENUMBER, Location(episode=int(number))))
    yield from (*numbers, *lengths[:1], *bounds[:1])


def _time_findings(tables: DatasetTables, rows: TableRows) -> Iterator[Finding]:
    task_N = _scalar_column(tables, rows, "task_index")
    if isinstance(task_N, Finding):
        yield task_N
    elif (unknown := ~np.isin(task_N, np.asarray(list(tables.tasks)))).any():
        row = int(np.flatnonzero(unknown)[0])
        yield found(
            "task_unknown",
            "task_index",
            f"is {int(task_N[row])}, but {TASKS} has {len(tables.tasks)} tasks; {int(unknown.sum())} rows",
            "Add the task's row to the table, or record again.",
            rows.place(row),
        )
    time_N = _scalar_column(tables, rows, "timestamp")
    if isinstance(time_N, Finding):
        yield time_N
        return
    expected = rows.frame_N / tables.fps
    tolerance = np.maximum(0.1 / tables.fps, 4 * np.spacing(np.abs(time_N).astype(np.float32)))
    off = ~(np.abs(time_N - expected) <= tolerance)
    if off.any():
        row = int(np.flatnonzero(off)[0])
        real = _real_rate(time_N, rows)
        yield found(
            "timestamps_differ",
            "timestamp",
            f"is {float(time_N[row]):.6g} s where frame_index / fps is "
            f"{expected[row]:.6g} s; {int(off.sum())} rows. fps says {tables.fps:g}, the rows {real:.4g}",
            "Correct fps in meta/info.json, or the time stamps.",
            rows.place(row),
            severity="error" if "video" in tables.cameras.values() else "warning",  # nothing else is read by them
        )


def _scalar_column(tables: DatasetTables, rows: TableRows, key: str) -> np.ndarray | Finding:
    try:
        column = read_column(rows.files, key, rows.used)
    except (*READ_ERRORS, ValueError, KeyError) as error:
        return found("column_missing", key, f"can't be read: {first_line(error)}", REPAIR)
    if column.num_null:
        return found("null_values", key, "has rows without a value", REPAIR)
    values: np.ndarray = column.values_ND[:, 0]
    return values


def _real_rate(time_N: np.ndarray, rows: TableRows) -> float:
    """Frames a second by the median step of the time stamps within episodes."""
    steps = np.diff(time_N.astype(np.float64))
    inside = np.ones(len(steps), bool)
    inside[rows.starts_R[1:] - 1] = False
    step = float(np.median(steps[inside])) if inside.any() else float("nan")
    return 1 / step if step > 0 else float("nan")
