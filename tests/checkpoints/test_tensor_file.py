# SPDX-License-Identifier: Apache-2.0
"""Files of tensors: written one tensor at a time, readable by the library, refused by name when damaged."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from embodix.tensor_file import (
    DIGESTS_FILE,
    DTYPES,
    INDEX_FILE,
    LENGTH_BYTES,
    WEIGHTS_FILE,
    Digests,
    FileFormatError,
    TensorFiles,
    TensorFileWriter,
    TensorSpec,
    read_header,
)


def _tensors() -> dict[str, torch.Tensor]:
    """One tensor of each dtype, of odd sizes, a scalar and an empty one."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"layer.{name.lower()}": (torch.rand(3, 5, generator=generator) * 9).to(dtype) for name, dtype in DTYPES.items()
    }
    return {**tensors, "scalar": torch.tensor(1.5), "empty": torch.zeros(0, 4)}


def _specs(tensors: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path = folder / WEIGHTS_FILE
    with TensorFileWriter(path, _specs(tensors), {"format": "pt", "made": "here"}) as writer:
        for name in reversed(list(tensors)):
            writer.write(name, tensors[name])
    return path


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def _read_all(folder: Path) -> None:
    header, digests = read_header(folder / WEIGHTS_FILE), Digests.read(folder)
    assert digests is not None
    digests.require_header(folder / WEIGHTS_FILE, header)
    with TensorFiles(folder) as files:
        for name in files.specs:
            digests.require_tensor(folder / WEIGHTS_FILE, name, files.tensor(name))


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    tensors = _tensors()
    loaded = load_file(_write(tmp_path, tensors))
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].shape == tensor.shape
        assert name in ("scalar", "empty") or _same(loaded[name], tensor), name
    assert loaded["scalar"].item() == 1.5
    with safe_open(tmp_path / WEIGHTS_FILE, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "made": "here"}
    _read_all(tmp_path)


def test_what_the_library_wrote_is_read(tmp_path: Path) -> None:
    tensors = _tensors()
    save_file(tensors, tmp_path / WEIGHTS_FILE, metadata={"format": "pt"})
    with TensorFiles(tmp_path) as files:
        assert files.specs == _specs(tensors)
        assert files.metadata == {"format": "pt"}
        assert all(torch.equal(files.tensor(name).float(), tensors[name].float()) for name in tensors)
        assert list(files.specs) == list(load_file(tmp_path / WEIGHTS_FILE))  # upstream's order counts


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    tensors = _tensors()
    places = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, tmp_path / file)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    with TensorFiles(tmp_path) as files:
        assert files.specs == _specs(tensors)
        assert all(torch.equal(files.tensor(name).float(), tensors[name].float()) for name in tensors)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {**places, "absent": places["scalar"]}}))
    with pytest.raises(FileFormatError, match=r"tensor absent is in model-0000\d-of-00002.safetensors; it isn't"):
        TensorFiles(tmp_path)
    (tmp_path / places["scalar"]).unlink()
    with pytest.raises(FileFormatError, match="which is missing"):
        TensorFiles(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        TensorFiles(tmp_path)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return _write(tmp_path_factory.mktemp("written"), _tensors()).read_bytes()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_changed_byte_is_found(
    written: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """In the length, in the header and in the values: a digest covers every byte."""
    header_end = LENGTH_BYTES + int.from_bytes(written[:LENGTH_BYTES], "little")
    place = data.draw(st.one_of(st.integers(0, header_end - 1), st.integers(header_end, len(written) - 1)))
    change = data.draw(st.integers(1, 255))
    folder = tmp_path_factory.mktemp("changed")
    path = _write(folder, _tensors())
    assert path.read_bytes() == written
    path.write_bytes(written[:place] + bytes([written[place] ^ change]) + written[place + 1 :])
    with pytest.raises(FileFormatError):
        _read_all(folder)


@settings(max_examples=40, deadline=None)
@given(length=st.integers(0, 10**6))
def test_a_cut_off_file_is_found(written: bytes, tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    folder = tmp_path_factory.mktemp("cut")
    (folder / WEIGHTS_FILE).write_bytes(written[: length % len(written)])
    with pytest.raises(FileFormatError):
        read_header(folder / WEIGHTS_FILE)


def test_the_tensor_that_is_cut_off_or_damaged_is_named(tmp_path: Path, written: bytes) -> None:
    path = _write(tmp_path, _tensors())
    path.write_bytes(written[:-1])
    with pytest.raises(FileFormatError, match=r"cut off in tensor layer.u8"):
        read_header(path)
    path.write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
    with pytest.raises(FileFormatError, match=r"Tensor layer.u8 of .* is damaged"):
        _read_all(tmp_path)
    path.write_bytes(written + b"x")
    with pytest.raises(FileFormatError, match="1 bytes after its last tensor"):
        read_header(path)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}, "tensor x has the dtype 'F4'"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "takes 12 bytes; the header gives it 8"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, r"tensor x has the shape \[-2\]"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, "tensor x begins at 4, not 0"),
        ({"dtype": "F32", "shape": [2]}, "tensor x has no dtype, shape and place"),
        ("text", "tensor x has no dtype, shape and place"),
    ],
)
def test_a_wrong_header_names_the_tensor(tmp_path: Path, field: object, message: str) -> None:
    header = json.dumps({"x": field}).encode()
    (tmp_path / WEIGHTS_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(FileFormatError, match=message):
        read_header(tmp_path / WEIGHTS_FILE)


def test_other_digests_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path, _tensors())
    digests = json.loads((tmp_path / DIGESTS_FILE).read_text())
    del digests["tensors"]["scalar"]
    (tmp_path / DIGESTS_FILE).write_text(json.dumps(digests))
    found = Digests.read(tmp_path)
    assert found is not None
    with pytest.raises(FileFormatError, match=r"tensors it should not hold: \['scalar'\]"):
        found.require_header(path, read_header(path))
    (tmp_path / DIGESTS_FILE).write_text("{")
    with pytest.raises(FileFormatError, match=r"tensor_digests.json is damaged"):
        Digests.read(tmp_path)


def test_a_tensor_that_does_not_come_is_noticed(tmp_path: Path) -> None:
    writer = TensorFileWriter(tmp_path / WEIGHTS_FILE, {"x": TensorSpec(torch.float32, (2,))}, {})
    with pytest.raises(AssertionError, match="announced and not written"), writer:
        pass
    assert not (tmp_path / DIGESTS_FILE).exists()


PEAK_MEMORY = """
import resource, sys, torch
from pathlib import Path
from embodix.tensor_file import TensorFileWriter, TensorSpec

num_tensors, size = int(sys.argv[1]), 4_000_000
specs = {f"t{i}": TensorSpec(torch.float32, (size,)) for i in range(num_tensors)}
with TensorFileWriter(Path(sys.argv[2]) / "model.safetensors", specs, {}) as writer:
    for name in specs:
        writer.write(name, torch.ones(size))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peaks = []
    for num_tensors in (2, 20):
        command = [sys.executable, "-c", PEAK_MEMORY, str(num_tensors), str(tmp_path)]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] - peaks[0] < 3 * 16_000_000  # 18 more tensors of 16 MB


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from embodix.tensor_file import TensorFileWriter, TensorSpec

specs = {f"t{i}": TensorSpec(torch.float32, (1000,)) for i in range(3)}
with TensorFileWriter(Path(sys.argv[1]) / "model.safetensors", specs, {}) as writer:
    writer.write("t0", torch.ones(1000))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_leaves_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(FileFormatError):
        read_header(tmp_path / WEIGHTS_FILE)
    assert not (tmp_path / DIGESTS_FILE).exists()
