# SPDX-License-Identifier: Apache-2.0
"""What a run reads of a data set: several columns joined to one vector, and statistics though some are missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="lerobot_dataset_metadata",
    target="lerobot.datasets.dataset_metadata.LeRobotDatasetMetadata._load_metadata, "
    "lerobot.datasets.dataset_reader.DatasetReader._load_hf_dataset",
    requires={"lerobot": ">=0.5.1,<0.5.2"},
    symptom="A policy reads observation.state and action; a data set that keeps them in several columns can't be "
    "trained on, and vectors of one dimension lose their axis in a batch. Without statistics of an image the factory "
    "fails, whether or not the policy normalises images.",
    upstream="https://github.com/huggingface/lerobot/issues/1576",
    why_safe="Only data sets that the config joins, those whose state or action has one dimension, with the same "
    "numbers in the order that the config says, and those that lack statistics; what a policy normalises without any "
    "is found by the check before the run.",
    remove_when="upstream's data set joins columns and does without statistics that nobody reads",
)


def apply(joins: Mapping[tuple[str, str | None], Mapping[str, Sequence[str]]] | None = None) -> Callable[[], None]:
    """Patch metadata and reader.

    Args:
        joins: repo id and root as they are asked for -> key -> the keys that it is made of.
    """
    from lerobot.datasets import dataset_metadata, dataset_reader

    from embodix.data.joined_columns import complete_join, dataset_place, joined_features, joined_rows, joined_stats

    load_metadata = dataset_metadata.LeRobotDatasetMetadata._load_metadata
    load_rows = dataset_reader.DatasetReader._load_hf_dataset

    def _load_metadata(self: Any) -> None:
        load_metadata(self)
        join = (joins or {}).get(dataset_place(self.repo_id, self._requested_root), {})
        self.embodix_join = complete_join(join, self.info["features"])
        self.embodix_recorded_features = self.info["features"]
        if self.embodix_join:
            self.info = {**self.info, "features": joined_features(self.embodix_join, self.info["features"])}
            self.stats = joined_stats(self.embodix_join, self.stats or {})
        self.stats = {**{camera: {} for camera in self.camera_keys}, **(self.stats or {})}

    def _load_hf_dataset(self: Any) -> Any:
        join = getattr(self._meta, "embodix_join", None)
        if not join:
            return load_rows(self)
        joined, self._meta.info = self._meta.info, {**self._meta.info, "features": self._meta.embodix_recorded_features}
        try:
            rows = load_rows(self)
        finally:
            self._meta.info = joined
        rows = joined_rows(join, rows)
        rows.set_transform(dataset_reader.hf_transform_to_torch)
        return rows

    undo_metadata = replace_attribute(dataset_metadata.LeRobotDatasetMetadata, "_load_metadata", _load_metadata)
    undo_rows = replace_attribute(dataset_reader.DatasetReader, "_load_hf_dataset", _load_hf_dataset)

    def undo() -> None:
        undo_rows()
        undo_metadata()

    return undo
