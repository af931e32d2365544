# SPDX-License-Identifier: Apache-2.0
"""Dense fp32 attention with an explicit mask: what every backend is checked against."""

from __future__ import annotations

import torch
from torch import Tensor

from embodix.attention.segments import Segments


def visible_keys(segments: Segments, *, causal: bool, device: torch.device) -> Tensor:
    """Bool ``[N, M]``: which packed key each packed query may see."""
    num_q, num_k = sum(segments.lengths_q), sum(segments.lengths_k)
    visible = torch.zeros(num_q, num_k, dtype=torch.bool, device=device)
    start_q = start_k = 0
    for length_q, length_k in zip(segments.lengths_q, segments.lengths_k, strict=True):
        block = torch.ones(length_q, length_k, dtype=torch.bool, device=device)
        if causal:
            block = block.tril(diagonal=length_k - length_q)
        visible[start_q : start_q + length_q, start_k : start_k + length_k] = block
        start_q, start_k = start_q + length_q, start_k + length_k
    return visible


def reference_attention(
    q_NHD: Tensor,
    k_MGD: Tensor,
    v_MGD: Tensor,
    segments: Segments,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """fp32 attention over the whole packed batch with a dense mask, ``[N, H, D]``; rows that see no key are 0."""
    group = q_NHD.shape[1] // k_MGD.shape[1]
    q_HND = q_NHD.float().transpose(0, 1)
    k_HMD = k_MGD.float().transpose(0, 1).repeat_interleave(group, dim=0)
    v_HMD = v_MGD.float().transpose(0, 1).repeat_interleave(group, dim=0)
    visible = visible_keys(segments, causal=causal, device=q_NHD.device)
    scores = q_HND @ k_HMD.transpose(1, 2) * (q_NHD.shape[-1] ** -0.5 if scale is None else scale)
    lowest = torch.finfo(torch.float32).min
    weights = torch.softmax(scores.masked_fill(~visible, lowest), dim=-1).masked_fill(~visible, 0.0)
    return (weights @ v_HMD).transpose(0, 1)
