# SPDX-License-Identifier: Apache-2.0
"""Which files a sample is read from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def files_of_samples(dataset: Any) -> np.ndarray:
    """``[num_samples]``: a number for the set of files that each sample of a ``LeRobotDataset`` is read from.

    Video files where there are videos (several episodes share one), the data file otherwise.
    """
    table = dataset.meta.episodes.with_format("arrow")[:]
    stores = [f"videos/{key}" for key in dataset.meta.video_keys] or ["data"]
    places = [table[f"{store}/{part}"].to_numpy() for store in stores for part in ("chunk_index", "file_index")]
    files_of_episode = np.unique(np.stack(places, axis=1), axis=0, return_inverse=True)[1].ravel()
    return files_of_episode[dataset.hf_dataset.data.column("episode_index").to_numpy()]


def count_opens(files: Sequence[int], num_open: int) -> int:
    """How often a reader that keeps the ``num_open`` files used last opens one, for a sequence of reads."""
    kept: dict[int, None] = {}
    opens = 0
    for file in files:
        if file in kept:
            del kept[file]
        else:
            opens += 1
        kept[file] = None
        if len(kept) > num_open:
            del kept[next(iter(kept))]
    return opens
