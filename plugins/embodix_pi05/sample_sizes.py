# SPDX-License-Identifier: Apache-2.0
"""Prefix tokens and images of every sample for π0.5: its prompt holds the state, so that each sample is tokenised.

The prompts are built and tokenised by upstream's own processor steps, from the state and task columns alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from embodix.data.sample_sizes import SizedDataset
from embodix.packing.sample_cost import IntArray, SampleSizes
from embodix_pi05.prefix import patches_per_image

STATE_KEY, TOKEN_MASK_KEY = "observation.state", "observation.language.attention_mask"
PROMPTS_AT_A_TIME = 4096


def sample_sizes(
    policy: Any, datasets: Sequence[SizedDataset], flow_samples: int, progress: Callable[[int], None]
) -> SampleSizes:
    """Sizes of all samples, data set after data set; see ``embodix.data.sample_sizes``."""
    num_patches = patches_per_image(policy)
    prompts, images = [], []
    for part in datasets:
        prompts.append(_prompt_lengths(part, progress))
        present = [key for key in policy.config.image_features if key in part.preprocessed([0])]
        images.append(len(present) - part.num_absent())
    images_N = np.concatenate(images)
    prefix_N = np.concatenate(prompts) + images_N * num_patches
    return SampleSizes(prefix_N, images_N, policy.config.chunk_size * flow_samples)


def _prompt_lengths(part: SizedDataset, progress: Callable[[int], None]) -> IntArray:
    state_key = state_column(part)
    states_ND = torch.from_numpy(part.column(state_key).astype(np.float32)).reshape(len(part), -1)
    names, tasks_N = part.task_names(), part.column("task_index").reshape(-1)
    lengths = []
    for start in range(0, len(part), PROMPTS_AT_A_TIME):
        rows = slice(start, start + PROMPTS_AT_A_TIME)
        batch = {state_key: states_ND[rows], "task": [names[index] for index in tasks_N[rows]]}
        mask_BL = part.preprocess(batch)[TOKEN_MASK_KEY]
        lengths.append(mask_BL.sum(dim=1).cpu().numpy().astype(np.int64))
        progress(len(lengths[-1]))
    return np.concatenate(lengths)


def state_column(part: SizedDataset) -> str:
    """The column that becomes the policy's state, renamed by the preprocessor or not.

    Raises:
        ValueError: no column does.
    """
    columns = list(part.dataset.meta.features)
    if STATE_KEY in columns:
        return STATE_KEY
    for step in getattr(part.preprocess, "steps", ()):
        for column, renamed in (getattr(step, "rename_map", None) or {}).items():
            if renamed == STATE_KEY and column in columns:
                return str(column)
    raise ValueError(
        f"π0.5's prompt holds {STATE_KEY}; the data set has {', '.join(columns)}. Name its column in rename_map."
    )
