# SPDX-License-Identifier: Apache-2.0
"""The call every attention backend answers, and the checks they share.

Shape suffixes: N packed queries, M packed keys, H query heads, G key/value heads (H is a multiple of G), D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodix.attention.segments import Segments


def dtype_problem(dtype: torch.dtype) -> str | None:
    """Why a dtype is refused, or None."""
    if dtype == torch.float16:
        return "fp16 is refused: its range overflows in attention scores; use bfloat16 or float32"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"needs float32 or bfloat16, got {dtype}"
    return None


def require_packed(q_NHD: Tensor, k_MGD: Tensor, v_MGD: Tensor, segments: Segments) -> None:
    """Refuse inputs that do not fit the segments.

    Raises:
        ValueError: with the rule that is broken and what was got.
    """
    problem = dtype_problem(q_NHD.dtype)
    if problem:
        raise ValueError(f"Packed attention: {problem}.")
    if q_NHD.ndim != 3 or k_MGD.ndim != 3 or k_MGD.shape != v_MGD.shape:
        raise ValueError(
            "Packed attention takes q [N, H, D] and k, v [M, G, D]; "
            f"got {tuple(q_NHD.shape)}, {tuple(k_MGD.shape)}, {tuple(v_MGD.shape)}."
        )
    if not q_NHD.dtype == k_MGD.dtype == v_MGD.dtype:
        raise ValueError(
            f"q, k and v need one dtype; got {q_NHD.dtype}, {k_MGD.dtype}, {v_MGD.dtype}. Cast them to the dtype of q."
        )
    if q_NHD.shape[1] % k_MGD.shape[1] or q_NHD.shape[2] != k_MGD.shape[2]:
        raise ValueError(
            "Query heads must be a multiple of key/value heads and head_dim must agree; "
            f"got q {tuple(q_NHD.shape)} and k {tuple(k_MGD.shape)}."
        )
    wanted = (sum(segments.lengths_q), sum(segments.lengths_k))
    if wanted != (q_NHD.shape[0], k_MGD.shape[0]):
        raise ValueError(
            f"Segments cover {wanted[0]} queries and {wanted[1]} keys; "
            f"got {q_NHD.shape[0]} and {k_MGD.shape[0]}. Build the segments from this batch's lengths."
        )
