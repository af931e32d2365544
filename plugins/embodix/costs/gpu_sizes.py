# SPDX-License-Identifier: Apache-2.0
"""Common sizes of a GPU's memory, and the smallest that holds a training step."""

from __future__ import annotations

GPU_GIGABYTES = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141)
USABLE = 0.9  # the rest is the CUDA context's and lost between allocations


def smallest_gpu(num_bytes: float) -> int | None:
    """Gigabytes of the smallest common GPU that holds them; None where none does."""
    return next((size for size in GPU_GIGABYTES if num_bytes <= USABLE * size * 1e9), None)
