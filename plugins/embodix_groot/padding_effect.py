# SPDX-License-Identifier: Apache-2.0
"""What upstream's attention to padding changes: its batched loss against that of valid tokens, on the same noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from embodix.attention.cpu import SegmentSdpa
from embodix.packing.layout import PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix_groot.fast_path import GrootFastPath


@dataclass(frozen=True)
class PaddingEffect:
    """Losses of one batch without dropout.

    Attributes:
        upstream: upstream's batched call, whose action head attends to padding.
        valid: valid tokens only, which is upstream one sample at a time.
        num_padding: rows of padding in upstream's batch.
        num_tokens: rows that are tokens.
    """

    upstream: float
    valid: float
    num_padding: int
    num_tokens: int

    @property
    def relative(self) -> float:
        """``|upstream - valid| / valid``; rounding error where the batch has no padding."""
        return abs(self.upstream - self.valid) / abs(self.valid)


@torch.no_grad()
def padding_effect(policy: Any, batch: Mapping[str, Any], seed: int = 0) -> PaddingEffect:
    """Both losses for a ``GrootPolicy`` and a training batch in the form of upstream's processors.

    Dropout is off meanwhile: padding would draw from the random stream, and the noise would differ.
    """
    fast_path = GrootFastPath(policy, FastPathSettings(PaddingFreePacker(), SegmentSdpa()))
    calls = {"upstream": lambda given: type(policy).forward(policy, given), "valid": fast_path.forward}
    losses: dict[str, float] = {}
    with dropout_off(policy):
        for name, forward in calls.items():
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                losses[name] = float(forward(dict(batch))[0])
    mask = batch["eagle_attention_mask"].bool()
    num_tokens = int(mask.sum())
    return PaddingEffect(
        upstream=losses["upstream"],
        valid=losses["valid"],
        num_padding=mask.numel() - num_tokens,
        num_tokens=num_tokens,
    )


@contextmanager
def dropout_off(policy: Any) -> Iterator[None]:
    """Evaluation mode for the duration of a block, then each module's own mode again."""
    training = {module: module.training for module in policy.modules()}
    policy.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
