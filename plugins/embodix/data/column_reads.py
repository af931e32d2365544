# SPDX-License-Identifier: Apache-2.0
"""Action chunks read from their own column, without decoding the images of the same rows.

Upstream reads n whole rows for a chunk of n actions. Here the queried column alone is read: as a view of the memory
map where it holds plain numbers, through upstream's own transform otherwise. The row of the sample's episode, which
upstream reads anew for each camera, is kept.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    import datasets
    from lerobot.datasets.dataset_reader import DatasetReader

# What torch.tensor makes of a list of Python values, which is what upstream's transform is given.
_TORCH_DTYPES = {"f": torch.float32, "i": torch.int64, "b": torch.bool}


def query_columns(reader: DatasetReader, query_indices: dict[str, list[int]]) -> dict[str, Tensor]:
    """What ``DatasetReader._query_hf_dataset`` returns, reading the queried columns alone."""
    to_row = reader._absolute_to_relative_idx
    result = {}
    for key, indices in query_indices.items():
        if key in reader._meta.video_keys:
            continue
        rows = indices if to_row is None else [to_row[index] for index in indices]
        result[key] = _column(reader, key).read(rows)
    return result


def chunk_indices(
    reader: DatasetReader, abs_idx: int, ep_idx: int
) -> tuple[dict[str, list[int]], dict[str, torch.Tensor]]:
    """What ``DatasetReader._get_query_indices`` returns, with the episode's bounds kept after their first reading."""
    start, end = _episode_bounds(reader, ep_idx)
    assert reader.delta_indices is not None
    indices: dict[str, list[int]] = {}
    padding: dict[str, torch.Tensor] = {}
    for key, deltas in reader.delta_indices.items():
        wanted = abs_idx + np.asarray(deltas)
        indices[key] = np.clip(wanted, start, end - 1).tolist()
        padding[f"{key}_is_pad"] = torch.from_numpy((wanted < start) | (wanted >= end))
    return indices, padding


class _MappedColumn:
    """A column of numbers: views of the memory-mapped chunks of its Arrow table."""

    def __init__(self, chunks: list[np.ndarray], dtype: torch.dtype) -> None:
        self._chunks = chunks
        self._starts = np.cumsum([0] + [len(chunk) for chunk in chunks])
        self._dtype = dtype

    def read(self, rows: list[int]) -> Tensor:
        places = np.asarray(rows)
        owners = np.searchsorted(self._starts, places, side="right") - 1
        values = np.empty((len(places), *self._chunks[0].shape[1:]), self._chunks[0].dtype)
        for owner in set(owners.tolist()):
            own = owners == owner
            values[own] = self._chunks[owner][places[own] - self._starts[owner]]
        return torch.from_numpy(values).to(self._dtype)


class _FormattedColumn:
    """A column of anything else, through upstream's transform."""

    def __init__(self, view: datasets.Dataset, key: str) -> None:
        self._view = view
        self._key = key

    def read(self, rows: list[int]) -> Tensor:
        return torch.stack(self._view[rows][self._key])


@dataclass
class _Known:
    """What is kept of a reader between two samples; nothing that would be sent to a spawned worker with it."""

    source: Any = None
    columns: dict[str, _MappedColumn | _FormattedColumn] = field(default_factory=dict)
    bounds: dict[int, tuple[int, int]] = field(default_factory=dict)


known_readers: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()


def _known_of(reader: DatasetReader) -> _Known:
    known = known_readers.get(reader)
    if known is None:
        known = known_readers[reader] = _Known()
    return known


def _column(reader: DatasetReader, key: str) -> _MappedColumn | _FormattedColumn:
    """The reader's column, made once for each data set that the reader loads."""
    known = _known_of(reader)
    if known.source is not reader.hf_dataset:
        known.source, known.columns = reader.hf_dataset, {}
    if key not in known.columns:
        known.columns[key] = _make_column(reader.hf_dataset, key)
    return known.columns[key]


def _make_column(dataset: datasets.Dataset, key: str) -> _MappedColumn | _FormattedColumn:
    view = dataset.select_columns([key])
    arrays = [_plain_numbers(chunk) for chunk in dataset.data.column(key).chunks if len(chunk)]
    chunks = [array for array in arrays if array is not None]
    if dataset._indices is not None or not chunks or len(chunks) < len(arrays):
        return _FormattedColumn(view, key)
    return _MappedColumn(chunks, _TORCH_DTYPES[chunks[0].dtype.kind])


def _plain_numbers(chunk: Any) -> np.ndarray | None:
    """``[rows]`` or ``[rows, size]`` values of an Arrow chunk, None for anything but numbers without gaps."""
    import pyarrow as pa

    shape: tuple[int, ...] = (len(chunk),)
    if isinstance(chunk, pa.ExtensionArray) or chunk.null_count:
        return None
    if pa.types.is_fixed_size_list(chunk.type):
        shape = (len(chunk), chunk.type.list_size)
        chunk = chunk.flatten()
    if chunk.null_count or not (pa.types.is_primitive(chunk.type) and chunk.type.bit_width <= 64):
        return None
    values = chunk.to_numpy(zero_copy_only=False)
    return values.reshape(shape) if values.dtype.kind in _TORCH_DTYPES else None


def _episode_bounds(reader: DatasetReader, ep_idx: int) -> tuple[int, int]:
    """First index of an episode and the one after its last."""
    bounds = _known_of(reader).bounds
    if ep_idx not in bounds:
        episode = reader._meta.episodes[ep_idx]
        bounds[ep_idx] = (episode["dataset_from_index"], episode["dataset_to_index"])
    return bounds[ep_idx]


class EpisodeRows:
    """The episode table with the rows read last at hand: upstream reads a sample's row once for each camera and more.

    Columns, slices and everything else are the table's.
    """

    def __init__(self, table: datasets.Dataset) -> None:
        self._table = table
        self._row = functools.lru_cache(maxsize=4096)(table.__getitem__)

    def __getitem__(self, key: Any) -> Any:
        return self._row(key) if isinstance(key, int) else self._table[key]

    def __len__(self) -> int:
        return len(self._table)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (EpisodeRows, (self._table,))


def read_columns(dataset: Any) -> None:
    """Make one data set read its chunks from their columns; others keep upstream's reading."""
    reader = dataset.reader
    if not isinstance(dataset.meta.episodes, EpisodeRows):
        dataset.meta.episodes = EpisodeRows(dataset.meta.episodes)
    # A bound method of a class that does not have it could not be sent to a spawned worker; a partial can.
    reader._query_hf_dataset = functools.partial(query_columns, reader)
    reader._get_query_indices = functools.partial(chunk_indices, reader)
