# SPDX-License-Identifier: Apache-2.0
"""Safetensors files, one tensor in memory at a time, with a digest of every tensor beside them.

The format is that of https://github.com/huggingface/safetensors: eight bytes with the length of a JSON header, the
header (dtype, shape and place of each tensor), the tensors' bytes. The library writes a file from tensors that are all
in memory and does not name the tensor at which a damaged file breaks, so both are done here; values are read by it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DIGESTS_FILE = "tensor_digests.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
LENGTH_BYTES = 8
LARGEST_HEADER = 100_000_000  # the library's own limit


class FileFormatError(ValueError):
    """A file of tensors that is damaged, or not what it says it is."""


@dataclass(frozen=True)
class TensorSpec:
    """What a header says of a tensor.

    Attributes:
        dtype: one of ``DTYPES``.
        shape: sizes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """A file's header, checked against the file's size.

    Attributes:
        specs: by tensor name, in the order of the file.
        metadata: free text by key.
        digest: SHA-256 of the header's bytes.
    """

    specs: dict[str, TensorSpec]
    metadata: dict[str, str]
    digest: str


def read_header(path: Path) -> Header:
    """Read and check a header.

    Raises:
        FileFormatError: no safetensors file, or one that is cut off or does not fit its header; names the tensor.
        FileNotFoundError: no such file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, LARGEST_HEADER):
            raise FileFormatError(f"{path} is no safetensors file, or its beginning is damaged or cut off.")
        text = file.read(length)
    try:
        fields = json.loads(text)
        metadata = {str(key): str(value) for key, value in fields.pop("__metadata__", {}).items()}
        entries = {str(name): _Entry.of(name, field) for name, field in fields.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FileFormatError(f"The header of {path} is damaged: {error}") from error
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    _require_covered(path, ordered, size - LENGTH_BYTES - length)
    return Header({name: entry.spec for name, entry in ordered.items()}, metadata, _digest(text))


@dataclass(frozen=True)
class _Entry:
    """A tensor's spec and the range of its bytes."""

    spec: TensorSpec
    begin: int
    end: int

    @classmethod
    def of(cls, name: str, field: Any) -> _Entry:
        try:
            dtype, shape, (begin, end) = field["dtype"], field["shape"], field["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(f"tensor {name} has no dtype, shape and place.") from error
        if dtype not in DTYPES:
            raise FileFormatError(f"tensor {name} has the dtype {dtype!r}; known are {', '.join(DTYPES)}.")
        if not isinstance(shape, list) or not all(_is_count(number) for number in (*shape, begin, end)):
            raise FileFormatError(f"tensor {name} has the shape {shape!r} at {begin!r} to {end!r}.")
        spec = TensorSpec(DTYPES[dtype], tuple(shape))
        if end - begin != spec.num_bytes:
            raise FileFormatError(
                f"tensor {name} of {dtype} {tuple(shape)} takes {spec.num_bytes} bytes; the header gives it "
                f"{end - begin}."
            )
        return cls(spec, begin, end)


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _require_covered(path: Path, entries: Mapping[str, _Entry], num_bytes: int) -> None:
    """Tensors follow each other without gap, up to the end of the file."""
    position = 0
    for name, entry in entries.items():
        if entry.begin != position:
            raise FileFormatError(
                f"The header of {path} is damaged: tensor {name} begins at {entry.begin}, not {position}."
            )
        if entry.end > num_bytes:
            raise FileFormatError(
                f"{path} is cut off in tensor {name}: {num_bytes} bytes of tensors, and it ends at {entry.end}. Copy "
                "the file again."
            )
        position = entry.end
    if position != num_bytes:
        raise FileFormatError(f"{path} has {num_bytes - position} bytes after its last tensor.")


class TensorFiles:
    """The tensors of a model, in one file or in those that an index names; a context manager.

    Args:
        folder: with ``model.safetensors`` or ``model.safetensors.index.json``.

    Raises:
        FileFormatError: neither is there, a file is damaged, or the index and its files disagree.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.specs: dict[str, TensorSpec] = {}
        self.metadata: dict[str, str] = {}
        self._files: dict[str, Path] = {}
        self._handles: dict[Path, Any] = {}
        self._stack = ExitStack()
        for path, names in _weight_files(folder).items():
            header = read_header(path)
            absent = sorted((names or set()) - set(header.specs))
            if absent:
                raise FileFormatError(
                    f"{folder / INDEX_FILE} says that tensor {absent[0]} is in {path.name}; it isn't."
                )
            self.metadata |= header.metadata
            self.specs |= header.specs
            self._files |= dict.fromkeys(header.specs, path)

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        path = self._files[name]
        if path not in self._handles:
            self._handles[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        tensor: Tensor = self._handles[path].get_tensor(name)
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.clear()
        self._stack.close()


def _weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files, each with the names that the index gives it; None where there is no index."""
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.is_file():
        return {single: None}
    if not index.is_file():
        raise FileFormatError(f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}.")
    files: dict[Path, set[str] | None] = {}
    for name, file_name in json.loads(index.read_text())["weight_map"].items():
        path = folder / file_name
        if not path.is_file():
            raise FileFormatError(f"{index} says that tensor {name} is in {file_name}, which is missing.")
        names = files.setdefault(path, set())
        assert names is not None
        names.add(name)
    return files


class TensorFileWriter:
    """Writes a file whose tensors come one at a time and in any order; a context manager.

    Args:
        path: the file; ``tensor_digests.json`` is written beside it when all tensors are there.
        specs: every tensor that will come.
        metadata: free text for the header.

    Leaving the block without error when a tensor has not come is an ``AssertionError``.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> None:
        self._path = path
        self._specs = dict(specs)
        # Widest first, as the library writes: every tensor then lies at a multiple of its element size.
        ordered = sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))
        header = _header_bytes(ordered, specs, metadata)
        self._digests = {"header": _digest(header), "tensors": dict[str, str]()}
        self._places = _places(ordered, specs, LENGTH_BYTES + len(header))
        self._file = path.open("wb")
        self._file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put one tensor into its place."""
        spec = TensorSpec(tensor.dtype, tuple(tensor.shape))
        assert spec == self._specs[name], f"{name}: {spec} was announced as {self._specs[name]}"
        data = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        self._file.seek(self._places[name])
        self._file.write(data)
        self._tensor_digests[name] = _digest(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._file:
            if error is not None:
                return
            absent = sorted(set(self._specs) - set(self._tensor_digests))
            assert not absent, f"announced and not written: {absent}"
            self._file.flush()
            os.fsync(self._file.fileno())
        digests = self._path.with_name(DIGESTS_FILE)
        digests.write_text(json.dumps({"algorithm": "sha256", **self._digests}, indent=1, sort_keys=True) + "\n")

    @property
    def _tensor_digests(self) -> dict[str, str]:
        digests = self._digests["tensors"]
        assert isinstance(digests, dict)
        return digests


def _header_bytes(ordered: Sequence[str], specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, begin in _places(ordered, specs, 0).items():
        spec = specs[name]
        offsets = [begin, begin + spec.num_bytes]
        fields[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _places(ordered: Sequence[str], specs: Mapping[str, TensorSpec], begin: int) -> dict[str, int]:
    places = {}
    for name in ordered:
        places[name] = begin
        begin += specs[name].num_bytes
    return places


@dataclass(frozen=True)
class Digests:
    """What a file's bytes were when it was written."""

    header: str
    tensors: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> Digests | None:
        """Those beside a file; None where its writer left none.

        Raises:
            FileFormatError: the digests themselves are damaged.
        """
        path = folder / DIGESTS_FILE
        if not path.is_file():
            return None
        try:
            fields = json.loads(path.read_bytes())
            return cls(str(fields["header"]), {str(name): str(digest) for name, digest in fields["tensors"].items()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FileFormatError(f"{path} is damaged: {error}. Copy it again.") from error

    def require_header(self, path: Path, header: Header) -> None:
        """Refuse another header than the one that was written."""
        surplus, absent = sorted(set(header.specs) - set(self.tensors)), sorted(set(self.tensors) - set(header.specs))
        if surplus or absent:
            raise FileFormatError(
                f"{path} is not the file that was written: tensors it should not hold: {surplus[:3]}; that it lacks: "
                f"{absent[:3]}. Copy it again with {DIGESTS_FILE}."
            )
        if header.digest != self.header:
            raise FileFormatError(f"The header of {path} is not the one that was written. Copy the file again.")

    def require_tensor(self, path: Path, name: str, tensor: Tensor) -> None:
        """Refuse a tensor whose bytes are not those that were written."""
        data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        if _digest(data) != self.tensors[name]:
            raise FileFormatError(f"Tensor {name} of {path} is damaged: its bytes changed. Copy the file again.")


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
