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
    meta = dataset.meta
    episodes = dataset.episodes if dataset.episodes is not None else range(meta.total_episodes)
    numbers: dict[tuple[str, ...], int] = {}
    number_of = {}
    for episode in episodes:
        if meta.video_keys:
            files = tuple(str(meta.get_video_file_path(episode, key)) for key in meta.video_keys)
        else:
            files = (str(meta.get_data_file_path(episode)),)
        number_of[int(episode)] = numbers.setdefault(files, len(numbers))
    column = dataset.hf_dataset.with_format("numpy")["episode_index"]
    return np.asarray([number_of[int(episode)] for episode in np.asarray(column)])


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
