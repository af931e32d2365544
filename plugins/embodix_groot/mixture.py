# SPDX-License-Identifier: Apache-2.0
"""Batches of several embodiments as one batch of GR00T-N1.5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from embodix.data.preprocessing import (
    CAMERA_PAD_KEY,
    EmbodimentPart,
    PreprocessedBatch,
    common_keys,
    images_in_order,
    in_order,
    merge_values,
)


@dataclass(frozen=True)
class EagleMerger:
    """Prompts padded on the left as its tokenizer does, images one after the other in sample order.

    Args:
        pad_token_id: fills ``eagle_input_ids``.
    """

    pad_token_id: int

    def __call__(self, parts: Sequence[EmbodimentPart]) -> PreprocessedBatch:
        batch = PreprocessedBatch()
        for key in common_keys(parts):
            if key == CAMERA_PAD_KEY:  # columns of one embodiment; absent cameras have no tokens here
                continue
            values = [part.batch[key] for part in parts]
            if key in ("eagle_pixel_values", "eagle_image_sizes"):
                batch[key] = images_in_order(values, parts)
            elif key in ("eagle_input_ids", "eagle_attention_mask"):
                fill = self.pad_token_id if key == "eagle_input_ids" else 0
                length = max(value.shape[1] for value in values)
                padded = [torch.nn.functional.pad(v, (length - v.shape[1], 0), value=fill) for v in values]
                batch[key] = in_order(padded, parts)
            else:
                batch[key] = merge_values(values, parts, None)
        return batch


def merger_of(preprocessor: Any) -> EagleMerger:
    """How batches of members that are preprocessed so become one batch."""
    return EagleMerger(_pad_token_id(preprocessor))


def _pad_token_id(preprocessor: Any) -> int:
    for step in preprocessor.steps:
        if hasattr(step, "proc"):
            return int(step.proc.tokenizer.pad_token_id)
    raise ValueError("GR00T's preprocessor has no step with a tokenizer; is this upstream's pipeline?")
