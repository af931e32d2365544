# SPDX-License-Identifier: Apache-2.0
"""A policy and its optimizer on disk, each rank its part, as torch's distributed checkpoints (DCP) hold them.

A tensor is known by its parameter's name in the bare policy, so that what one layout has saved another can read. No
rank ever holds more of it than its own part, or one tensor.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from embodix.parallel.optimizer_state import SEPARATOR
from embodix.tensor_file import TensorFileWriter, TensorSpec

# One process alone reads and writes here on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

FOLDER = "sharded"  # in a checkpoint's training_state
METADATA_FILE = ".metadata"  # DCP writes it last
MODEL, OPTIMIZER, RANDOM = "model.", "optimizer.", "random."
Template = Callable[[str, torch.Size, torch.dtype], Tensor | None]


def begin_saving(
    state: Mapping[str, Mapping[str, Any]],
    random_state: Mapping[str, Tensor],
    index: int,
    folder: Path,
    group: dist.ProcessGroup | None,
) -> Future[Any]:
    """Copy this rank's part to memory of the host, and write it in the background; every rank must call.

    Args:
        state: of ``Placement.state``.
        random_state: of this rank, as upstream serializes it.
        index: of this rank among those that have samples of their own.
        folder: where the files go; it must be there.
        group: of its own, since it is used beside training; None for one process alone.
    """
    flat = {f"{MODEL}{name}": value for name, value in state["model"].items()}
    flat |= {f"{OPTIMIZER}{name}": value for name, value in state["optimizer"].items()}
    flat |= {f"{RANDOM}{index}.{name}": value for name, value in random_state.items()}
    saved = dcp.async_save(
        flat, storage_writer=dcp.FileSystemWriter(folder), process_group=group, no_dist=group is None
    )
    assert isinstance(saved, Future)
    return saved


def load_optimizer_state(folder: Path, template: Template, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """The optimizer's state by ``<parameter>::<key>``; every rank must call.

    Args:
        template: an empty tensor like this rank's part of a parameter's state, for its name, shape and dtype; None
            where it holds nothing of it.

    Raises:
        ValueError: the files are damaged.
    """
    wanted: dict[str, Tensor] = {}
    for key, stored in _tensors(folder, OPTIMIZER):
        name = key.removeprefix(OPTIMIZER).partition(SEPARATOR)[0]
        own = template(name, stored.size, stored.properties.dtype)
        if own is not None:
            wanted[key] = own
    _read(_Reader(folder), wanted, no_dist=not dist.is_initialized(), group=group)
    return {key.removeprefix(OPTIMIZER): value for key, value in wanted.items()}


def load_random_state(folder: Path, index: int, num_indices: int) -> dict[str, Tensor] | None:
    """The random state of one of the ranks that have samples of their own; None where there were not so many.

    Raises:
        ValueError: the files are damaged.
    """
    stored = {key.removeprefix(RANDOM): tensor for key, tensor in _tensors(folder, RANDOM)}
    if len({name.partition(".")[0] for name in stored}) != num_indices:
        return None
    own = {name: t for name, t in stored.items() if name.partition(".")[0] == str(index)}
    wanted = {f"{RANDOM}{name}": torch.empty(t.size, dtype=t.properties.dtype) for name, t in own.items()}
    _read(_Reader(folder), wanted, no_dist=True)
    return {key.removeprefix(f"{RANDOM}{index}."): value for key, value in wanted.items()}


def export_model(folder: Path, path: Path) -> None:
    """Write the policy's weights as upstream's ``model.safetensors``, one tensor in memory at a time, by one process.

    Raises:
        ValueError: the files are damaged.
    """
    stored = {key.removeprefix(MODEL): tensor for key, tensor in _tensors(folder, MODEL)}
    specs = {name: TensorSpec(tensor.properties.dtype, tuple(tensor.size)) for name, tensor in stored.items()}
    reader = _Reader(folder)
    with TensorFileWriter(path, specs, {"format": "pt"}) as file:
        for name, spec in specs.items():
            value = torch.empty(spec.shape, dtype=spec.dtype)
            _read(reader, {f"{MODEL}{name}": value}, no_dist=True)
            file.write(name, value)


def holds_sharded_state(training_state: Path) -> bool:
    """Whether a checkpoint's ``training_state`` was written by ranks, each its part."""
    return (training_state / FOLDER / METADATA_FILE).is_file()


def _tensors(folder: Path, prefix: str) -> Iterator[tuple[str, TensorStorageMetadata]]:
    try:
        entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # the metadata are a pickle, which fails in many ways
        raise ValueError(f"{folder / METADATA_FILE} is damaged: {type(error).__name__}: {error}.") from error
    for key, entry in entries.items():
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata):
            yield key, entry


class _Reader(dcp.FileSystemReader):
    """Reads the metadata of a checkpoint once, however often it is loaded from."""

    @functools.cached_property
    def _read_once(self) -> Metadata:
        return super().read_metadata()

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._read_once


def _read(reader: _Reader, into: dict[str, Tensor], no_dist: bool, group: dist.ProcessGroup | None = None) -> None:
    try:
        dcp.load(into, storage_reader=reader, process_group=group, no_dist=no_dist)
    except (dcp.CheckpointException, OSError, RuntimeError) as error:
        raise ValueError(f"The checkpoint in {reader.path} can't be read: {type(error).__name__}: {error}.") from error
