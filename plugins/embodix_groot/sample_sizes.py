# SPDX-License-Identifier: Apache-2.0
"""Prompt tokens and images of every sample for GR00T-N1.5: they depend on the task and the data set's cameras only.

One sample of each task goes through upstream's own preprocessor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from embodix.data.sample_sizes import SizedDataset
from embodix.packing.sample_cost import SampleSizes
from embodix_groot.action_head import num_action_tokens


def sample_sizes(
    policy: Any, datasets: Sequence[SizedDataset], flow_samples: int, progress: Callable[[int], None]
) -> SampleSizes:
    """Sizes of all samples, data set after data set; see ``embodix.data.sample_sizes``."""
    prefix, images = [], []
    num_actions = 0
    for part in datasets:
        tasks_N = part.column("task_index").reshape(-1)
        _, first, task_of_sample = np.unique(tasks_N, return_index=True, return_inverse=True)
        batches = [part.preprocessed([int(index)]) for index in first]
        lengths = np.array([int(batch["eagle_attention_mask"].sum()) for batch in batches], dtype=np.int64)
        counts = np.array([batch["eagle_pixel_values"].shape[0] for batch in batches], dtype=np.int64)
        prefix.append(lengths[task_of_sample])
        images.append(counts[task_of_sample])
        num_actions = num_action_tokens(policy._groot_model.action_head, batches[0]["state"].shape[1])
        progress(len(part))
    return SampleSizes(np.concatenate(prefix), np.concatenate(images), num_actions * flow_samples)
