# SPDX-License-Identifier: Apache-2.0
"""Read action chunks from their own column: the other columns, images among them, stay undecoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from embodix.patching import Patch, replace_attribute

if TYPE_CHECKING:
    import datasets
    from lerobot.datasets.dataset_reader import DatasetReader
    from torch import Tensor

PATCH = Patch(
    name="lerobot_column_reads",
    target="lerobot.datasets.dataset_reader.DatasetReader._query_hf_dataset",
    requires={"lerobot": ">=0.5.1,<0.5.2"},
    symptom="Reading a chunk of n actions decodes every column of n rows; with images stored as images, n images of "
    "each camera.",
    upstream="https://github.com/huggingface/lerobot/issues/2895",
    why_safe="The same rows of the same column through the same transform; only columns nobody asked for are not read.",
    remove_when="upstream reads the queried columns alone",
)


def apply() -> Callable[[], None]:
    """Patch the reader's class; readers that exist already are covered."""
    import torch
    from lerobot.datasets.dataset_reader import DatasetReader

    def query_columns(self: DatasetReader, query_indices: dict[str, list[int]]) -> dict[str, Tensor]:
        to_row = self._absolute_to_relative_idx
        result = {}
        for key, indices in query_indices.items():
            if key in self._meta.video_keys:
                continue
            rows = indices if to_row is None else [to_row[index] for index in indices]
            result[key] = torch.stack(_column_view(self, key)[rows][key])
        return result

    return replace_attribute(DatasetReader, "_query_hf_dataset", query_columns)


def _column_view(reader: DatasetReader, key: str) -> datasets.Dataset:
    """The reader's data set narrowed to one column, made once for each data set that the reader loads."""
    source, views = getattr(reader, "_embodix_column_views", (None, {}))
    if source is not reader.hf_dataset:
        views = {}
        reader._embodix_column_views = (reader.hf_dataset, views)
    if key not in views:
        views[key] = reader.hf_dataset.select_columns([key])
    return views[key]
