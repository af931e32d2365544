# SPDX-License-Identifier: Apache-2.0
"""Read action chunks from their own column: the other columns, images among them, stay undecoded."""

from __future__ import annotations

from collections.abc import Callable

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="lerobot_column_reads",
    target="lerobot.datasets.dataset_reader.DatasetReader._query_hf_dataset, _get_query_indices",
    requires={"lerobot": ">=0.5.1,<0.5.2"},
    symptom="Reading a chunk of n actions decodes every column of n rows; with images stored as images, n images of "
    "each camera.",
    upstream="https://github.com/huggingface/lerobot/issues/2895",
    why_safe="The same rows of the same column, equal in value and dtype; only columns nobody asked for are not read.",
    remove_when="upstream reads the queried columns alone",
)


def apply() -> Callable[[], None]:
    """Patch the reader's class; readers that exist already are covered."""
    from lerobot.datasets.dataset_reader import DatasetReader

    from embodix.data.column_reads import chunk_indices, query_columns

    undo_query = replace_attribute(DatasetReader, "_query_hf_dataset", query_columns)
    undo_indices = replace_attribute(DatasetReader, "_get_query_indices", chunk_indices)

    def undo() -> None:
        undo_indices()
        undo_query()

    return undo
