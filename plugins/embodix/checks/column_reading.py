# SPDX-License-Identifier: Apache-2.0
"""Every numeric column of a data set, read once, one column at a time over all files.

N: rows, D: dimensions of a key's vector, E: episodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embodix.checks.catalogue import found
from embodix.checks.dataset_tables import READ_ERRORS, REPAIR, DatasetTables, first_line
from embodix.checks.findings import Finding, Location, relative_to

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


@dataclass
class TableRows:
    """Which rows there are: the files that can be read, and the episode of each row that is used.

    Attributes:
        files: in order, those that can be opened.
        used: ``[N]`` of all rows, whether they belong to a used episode; None for all.
        episode_N, frame_N: of the used rows.
        starts_R, ends_R: bounds of the runs of rows of one episode.
    """

    files: list[Path] = field(default_factory=list)
    used: np.ndarray | None = None
    episode_N: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    frame_N: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    starts_R: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    ends_R: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def place(self, row: int, dimension: int | None = None) -> Location:
        """Of a used row."""
        return Location(int(self.episode_N[row]), int(self.frame_N[row]), dimension)


class UnequalRowsError(ValueError):
    """A column whose rows have different widths."""


@dataclass(frozen=True)
class Column:
    """Values of a key in the used rows.

    Attributes:
        values_ND: as stored, booleans as 0 and 1; of fewer rows where whole rows are missing.
        dtype: of the column.
        num_null: values that are missing.
    """

    values_ND: np.ndarray
    dtype: str
    num_null: int


def open_files(tables: DatasetTables) -> Iterator[Finding | Path]:
    """Each data file that can be opened, and a finding for each that can't."""
    for file in tables.data_files:
        try:
            pq.read_metadata(file)
            yield file
        except READ_ERRORS as error:
            name = relative_to(tables.root, file)
            yield found(
                "file_unreadable", "data", f"can't be read: {first_line(error)}", REPAIR, _place_of(tables, file, name)
            )


def _place_of(tables: DatasetTables, file: Path, name: str) -> Location:
    """With the first episode that the file holds."""
    owners = [row for row in tables.rows_of_episodes if tables.data_file_of(row) == file]
    episode = int(tables.episodes["episode_index"][owners[0]]) if owners else None
    return Location(episode=episode, file=name)


def read_column(files: list[Path], key: str, used: np.ndarray | None = None) -> Column:
    """A numeric column.

    Raises:
        OSError, pyarrow.ArrowException: a file is damaged or lacks the column.
        UnequalRowsError: rows of unequal width.
        ValueError: no numbers.
    """
    parts, num_null, dtype = [], 0, ""
    for file in files:
        column = pq.read_table(file, columns=[key]).column(key)
        for chunk in column.chunks:
            array, nulls, dtype = _vectors(chunk)
            parts.append(array)
            num_null += nulls
    values = np.concatenate(parts) if parts else np.empty((0, 1))
    aligned = used is not None and len(used) == len(values)
    return Column(values[used] if aligned else values, dtype, num_null)


def _vectors(chunk: Any) -> tuple[np.ndarray, int, str]:
    """``[rows, D]`` values of an Arrow chunk, how many are missing, and the dtype of the numbers."""
    if isinstance(chunk, pa.ExtensionArray):
        chunk = chunk.storage
    nulls = chunk.null_count
    num_rows = len(chunk) - (nulls if pa.types.is_nested(chunk.type) else 0)  # flattening leaves such rows out
    while pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type) or pa.types.is_fixed_size_list(chunk.type):
        widths = _widths(chunk)
        if len(widths) > 1:
            raise UnequalRowsError(f"has rows of {' and '.join(map(str, sorted(widths)[:3]))} values")
        chunk = chunk.flatten()
        nulls += chunk.null_count
    if not _is_number(chunk.type):
        raise ValueError(f"holds {chunk.type}, no numbers")
    values = chunk.to_numpy(zero_copy_only=False)  # a number that is missing among others becomes nan
    if values.dtype == object or values.dtype == bool:
        values = values.astype(np.float64 if chunk.null_count else np.uint8)
    return values.reshape(num_rows, -1) if num_rows else values.reshape(0, 1), nulls, str(chunk.type)


def _widths(chunk: Any) -> set[int]:
    if pa.types.is_fixed_size_list(chunk.type):
        return {chunk.type.list_size}
    lengths = chunk.value_lengths().drop_null().to_numpy(zero_copy_only=False)
    return set(np.unique(lengths).tolist())


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def side_by_side(parts: Sequence[Column]) -> Column:
    """Columns of the same rows as one.

    Raises:
        ValueError: they have different numbers of rows.
    """
    if len(parts) == 1:
        return parts[0]
    if len({len(part.values_ND) for part in parts}) > 1:
        raise ValueError("its parts have different numbers of rows")
    dtypes = sorted({part.dtype for part in parts})
    return Column(
        np.concatenate([part.values_ND for part in parts], axis=1), "+".join(dtypes), sum(p.num_null for p in parts)
    )
