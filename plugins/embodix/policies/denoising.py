# SPDX-License-Identifier: Apache-2.0
"""What an action sampler tells whoever watches it denoise."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class DenoisingObserver(Protocol):
    """Called by an action sampler after every denoising step; it must not change the state."""

    def __call__(self, step: int, state_BTA: Tensor) -> None:
        """``step`` counts from 0; ``state_BTA`` is the state after it, the last one the chunk (padded dimensions
        included)."""
        ...
