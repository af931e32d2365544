# SPDX-License-Identifier: Apache-2.0
"""What a data set or a folder of files holds, as a few facts and hashes: the same wherever it lies, cheap to take.

Images and videos are known by their size and their end (a parquet file's footer has sizes and bounds of every column);
numbers are read whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

END_BYTES, LARGE_BYTES = 1 << 16, 1 << 24
NAMED_FACTS = ("robot_type", "fps", "total_episodes", "total_frames", "total_tasks")


def dataset_content(root: Path) -> dict[str, Any]:
    """Facts and hashes of a LeRobotDataset; what lies on the hub alone (streamed) is known by its ``meta`` folder.

    Raises:
        ValueError: a parquet file that cannot be read; the message names it.
    """
    info = json.loads((root / "meta" / "info.json").read_text())
    data = sorted((root / "data").rglob("*.parquet"))
    return {
        **{name: info.get(name) for name in NAMED_FACTS},
        "info": _hash([json.dumps(info, sort_keys=True).encode()]),
        "statistics": files_content(root, ["meta/stats.json"]),
        "tasks": files_content(root, ["meta/tasks.parquet"]),
        "episodes": files_content(root, ["meta/episodes/**/*.parquet"]),
        "numbers": _hash(number for path in data for number in _numbers(path)),
        "files": _hash(_ends(root, [*data, *sorted((root / "videos").rglob("*.mp4"))])),
    }


def files_content(root: Path, patterns: Iterable[str] = ("**/*",)) -> str:
    """Hash of names and bytes of the files below a folder, hidden ones left out; of large ones as of videos."""
    paths = sorted({path for pattern in patterns for path in root.glob(pattern) if path.is_file()})
    shown = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(root).parts)]
    return _hash(part for path in shown for part in _ends(root, [path], whole_up_to=LARGE_BYTES))


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()[:16]


def _ends(root: Path, paths: Iterable[Path], whole_up_to: int = END_BYTES) -> Iterator[bytes]:
    """Name, size and last bytes of each file."""
    for path in paths:
        size = path.stat().st_size
        yield f"{path.relative_to(root)} {size}".encode()
        with path.open("rb") as file:
            file.seek(0 if size <= whole_up_to else size - END_BYTES)
            yield file.read()


def _numbers(path: Path) -> Iterator[bytes]:
    """The stored bytes of every column that holds numbers."""
    try:
        metadata = pq.read_metadata(path)
    except Exception as error:  # pyarrow's own errors have no class in common
        raise ValueError(f"{path} is no whole parquet file: {error}. Copy or record the data set again.") from error
    with path.open("rb") as file:
        for group in range(metadata.num_row_groups):
            row_group = metadata.row_group(group)
            for column in map(row_group.column, range(row_group.num_columns)):
                if column.physical_type != "BYTE_ARRAY":
                    file.seek(min(filter(None, (column.dictionary_page_offset, column.data_page_offset))))
                    yield f"{column.path_in_schema}".encode()
                    yield file.read(column.total_compressed_size)
