# SPDX-License-Identifier: Apache-2.0
"""Sound data sets of different robots, and ways to damage a copy of one."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from embodix.checks.run_needs import RunNeeds
from embodix.testing.datasets import write_dataset

QUANTILES = RunNeeds(
    policy="pi05",
    normalisation={"STATE": "QUANTILES", "ACTION": "QUANTILES"},
    chunk=8,
    widths={"observation.state": 32, "action": 32},
    language=True,
)


class Damage:
    """A copy of a data set that can be changed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def info(self, **changes: Any) -> None:
        """Fields of ``meta/info.json``; None takes one out."""
        path = self.root / "meta" / "info.json"
        content = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    def feature(self, key: str, **changes: Any) -> None:
        features = json.loads((self.root / "meta" / "info.json").read_text())["features"]
        self.info(features={**features, key: {**features[key], **changes}})

    def stats(self, key: str, **changes: Any) -> None:
        """Statistics of a key; None takes one out."""
        path = self.root / "meta" / "stats.json"
        content = json.loads(path.read_text())
        content[key] = {name: value for name, value in {**content[key], **changes}.items() if value is not None}
        path.write_text(json.dumps(content))

    def table(
        self, change: Callable[[dict[str, list[Any]]], None], name: str = "data/chunk-000/file-000.parquet"
    ) -> None:
        """Rewrite a table from its columns as lists; the types stay."""
        path = self.root / name
        table = pq.read_table(path)
        columns = table.to_pydict()
        change(columns)
        arrays = {
            k: pa.array(v, type=table.schema.field(k).type if k in table.schema.names else None)
            for k, v in columns.items()
        }
        pq.write_table(pa.table(arrays, schema=table.schema if list(arrays) == table.schema.names else None), path)

    def values(self, key: str, row: int, dimension: int, value: float) -> None:
        def change(columns: dict[str, list[Any]]) -> None:
            columns[key][row] = [*columns[key][row][:dimension], value, *columns[key][row][dimension + 1 :]]

        self.table(change)

    def episodes(self, change: Callable[[dict[str, list[Any]]], None]) -> None:
        self.table(change, "meta/episodes/chunk-000/file-000.parquet")

    def truncate(self, pattern: str) -> Path:
        """Cut the last third off the first file of a pattern."""
        path = sorted(self.root.glob(pattern))[0]
        content = path.read_bytes()
        path.write_bytes(content[: len(content) * 2 // 3])
        return path


def write_sweeping(root: Path, **options: Any) -> Path:
    """A data set whose episodes each sweep the same ranges, so that upstream's statistics fit it."""
    settings = {"episode_length": 24, "tasks": ("push the button", "open the drawer", "close it"), "sweeping": True}
    return write_dataset(root, **{**settings, **options})


def picture(level: int, size: int = 28) -> bytes:
    """A PNG of one grey."""
    stream = io.BytesIO()
    Image.fromarray(np.full((size, size, 3), level, np.uint8)).save(stream, "PNG")
    return stream.getvalue()
