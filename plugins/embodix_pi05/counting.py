# SPDX-License-Identifier: Apache-2.0
"""What counting a step of π0.5 needs: the layout of a sample, a batch, and the texts of its prompts.

A prompt holds the task and the state as numbers from 0 to 255; the state is drawn at five of its quantiles, all
dimensions at the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies.pi05.processor_pi05 import Pi05PrepareStateTokenizerProcessorStep
from lerobot.processor import NormalizerProcessorStep
from lerobot.processor.converters import create_transition
from lerobot.types import TransitionKey
from lerobot.utils.constants import OBS_STATE
from torch import Tensor

from embodix.contracts import SampleLayout, SampleShape
from embodix_pi05.fast_path import TOKEN_MASK_KEY, TOKENS_KEY
from embodix_pi05.prefix import patches_per_image

# Shares of the data that the five quantiles of LeRobot's statistics stand for.
_QUANTILES = {"q01": 0.05, "q10": 0.2, "q50": 0.5, "q90": 0.2, "q99": 0.05}


def sample_layout(policy: Any) -> SampleLayout:
    config = policy.config
    slots = len(config.image_features)
    return SampleLayout(patches_per_image(policy), config.chunk_size, config.tokenizer_max_length, slots)


def sample_batch(policy: Any, shape: SampleShape, batch_size: int) -> dict[str, Tensor]:
    """The first slots have images; the others are blank for upstream and for the packed path alike."""
    config = policy.config
    cameras = list(config.image_features.items())[: shape.images]
    batch = {key: torch.empty(batch_size, *feature.shape) for key, feature in cameras}
    mask_L = torch.arange(config.tokenizer_max_length) < shape.prompt
    batch[TOKEN_MASK_KEY] = mask_L.repeat(batch_size, 1)
    batch[TOKENS_KEY] = torch.zeros(batch[TOKEN_MASK_KEY].shape, dtype=torch.int64)
    batch["action"] = torch.empty(batch_size, config.chunk_size, config.max_action_dim)
    return batch


def prompt_texts(policy: Mapping[str, Any], task: str, stats: Mapping[str, list[float]]) -> dict[str, float]:
    """Prompt -> share of the task's samples, through upstream's own steps."""
    mode = NormalizationMode(str((policy.get("normalization_mapping") or {}).get("STATE", "QUANTILES")))
    features = {OBS_STATE: PolicyFeature(FeatureType.STATE, (len(stats.get("mean", stats.get("q50", []))),))}
    known = {OBS_STATE: dict(stats)} if stats else {}
    normalize = NormalizerProcessorStep(features, {FeatureType.STATE: mode}, known)
    prepare = Pi05PrepareStateTokenizerProcessorStep()
    texts: dict[str, float] = {}
    for quantile, share in _QUANTILES.items():
        state_1D = torch.tensor([stats.get(quantile) or stats.get("mean", [])])
        transition = create_transition(observation={OBS_STATE: state_1D}, complementary_data={"task": [task]})
        (text,) = prepare(normalize(transition))[TransitionKey.COMPLEMENTARY_DATA]["task"]
        texts[text] = texts.get(text, 0.0) + share
    return texts
