# SPDX-License-Identifier: Apache-2.0
"""Many short segments in one batched GEMM pair: padded to the longest, padding masked, grouped heads folded.

Walking over segments costs a fixed time each, which is most of the time where segments are short. Padding keys get a
weight of exactly 0, so the result is the same.

Shape suffixes: N packed queries, M packed keys, H query heads, G key/value heads, J = H / G heads of a group, D
head_dim, S segments, Q and K longest query and key segment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodix.attention.segments import PaddedRows, Segments

# Scores, of one segment and of all, up to which one batch beats the walk; see benchmarks/attention_segment_length.py.
# In fp32 only the fixed cost of a segment is saved; in bf16 plain GEMMs are faster too, until the scores leave the
# caches.
MAX_SEGMENT_SCORES = {torch.float32: 2**15, torch.bfloat16: 2**22}
MAX_SCORES = {torch.float32: 2**21, torch.bfloat16: 2**23}


def fits_one_batch(q_NHD: Tensor, segments: Segments, *, causal: bool) -> bool:
    """Whether these segments are better computed in one batch. Causal and empty segments are not."""
    if causal or min(segments.lengths_k) == 0 or len(segments.lengths_k) == 1:
        return False
    segment_scores = segments.max_q * segments.max_k * q_NHD.shape[1]
    all_scores = len(segments.lengths_q) * segment_scores
    return segment_scores <= MAX_SEGMENT_SCORES[q_NHD.dtype] and all_scores <= MAX_SCORES[q_NHD.dtype]


def batched_attention(q_NHD: Tensor, k_MGD: Tensor, v_MGD: Tensor, segments: Segments, scale: float) -> Tensor:
    """Bidirectional attention of all segments at once, ``[N, H, D]``."""
    num_groups, head_dim = k_MGD.shape[1:]
    q_SQGJD = _padded(q_NHD, segments.padded_q).unflatten(2, (num_groups, -1))
    num_segments, max_q, _, group, _ = q_SQGJD.shape
    queries = q_SQGJD.transpose(1, 2).reshape(num_segments * num_groups, max_q * group, head_dim)
    keys, values = (
        _padded(rows, segments.padded_k).transpose(1, 2).reshape(num_segments * num_groups, -1, head_dim)
        for rows in (k_MGD, v_MGD)
    )
    hidden = segments.padded_k.additive_mask(q_NHD.dtype).repeat_interleave(num_groups, dim=0)
    scores = torch.baddbmm(hidden[:, None], queries, keys.transpose(1, 2), alpha=scale)
    out = torch.bmm(torch.softmax(scores, dim=-1), values)
    out_SQHD = out.view(num_segments, num_groups, max_q, group, head_dim).transpose(1, 2).flatten(2, 3)
    return _packed(out_SQHD, segments.padded_q)


def _padded(rows_NHD: Tensor, padded: PaddedRows) -> Tensor:
    """``[S, longest, H, D]``, zeros where a segment is shorter."""
    shape = (padded.num_segments, padded.longest)
    if padded.rows is None:
        whole: Tensor = rows_NHD.unflatten(0, shape)
        return whole
    flat = rows_NHD.new_zeros(shape[0] * shape[1], *rows_NHD.shape[1:])
    filled: Tensor = flat.index_copy(0, padded.rows, rows_NHD).unflatten(0, shape)
    return filled


def _packed(padded_SQHD: Tensor, padded: PaddedRows) -> Tensor:
    flat = padded_SQHD.flatten(0, 1)
    return flat if padded.rows is None else flat.index_select(0, padded.rows)
