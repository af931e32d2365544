# SPDX-License-Identifier: Apache-2.0
"""A training batch of the features that a policy's config declares, for policies whose plugin does not give one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lerobot.utils.constants import ACTION, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor


def feature_batch(config: Any, batch_size: int) -> dict[str, Tensor]:
    """As upstream's loader stacks them: several steps where the config asks for steps."""

    def shape(deltas: Sequence[int] | None, feature: Sequence[int]) -> tuple[int, ...]:
        steps = () if deltas is None else (len(deltas),)
        return (batch_size, *steps, *feature)

    inputs = {key: shape(config.observation_delta_indices, f.shape) for key, f in config.input_features.items()}
    actions = shape(config.action_delta_indices, config.output_features[ACTION].shape)
    batch = {key: torch.zeros(size) for key, size in {**inputs, ACTION: actions}.items()}
    batch[f"{ACTION}_is_pad"] = torch.zeros(actions[:-1], dtype=torch.bool)
    length = getattr(config, "tokenizer_max_length", None)
    if length is not None:
        batch[OBS_LANGUAGE_TOKENS] = torch.zeros(batch_size, length, dtype=torch.int64)
        batch[OBS_LANGUAGE_ATTENTION_MASK] = torch.ones(batch_size, length, dtype=torch.bool)
    return batch
