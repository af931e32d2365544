# SPDX-License-Identifier: Apache-2.0
"""Backends without a kernel of their own: a walk over the segments, one padded batch, or whichever is faster.

Walking over segments costs a fixed time each, which is most of the time where segments are short: those are padded to
the longest and computed in one batched GEMM pair. Padding keys get a weight of exactly 0, so the result is the same.

Shape suffixes: N packed queries, M packed keys, S segments of L queries and K keys each, Q and K longest query and key
segment of a padded batch, H query heads, G key/value heads, J = H / G heads of a group, D head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from embodix.attention.folded_gemm import FoldedGemmAttention
from embodix.attention.segments import PaddedRows, Segments, dtype_problem, require_packed
from embodix.attention.transposed_gemm import TransposedGemmAttention


class SegmentGemm:
    """Two GEMMs and a softmax a segment, grouped heads folded into query rows. Made for CPUs."""

    name = "segment_gemm"
    preference: int | None = 60
    _attention: type[torch.autograd.Function] = FoldedGemmAttention

    def probe(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type not in ("cpu", "meta"):
            return f"walks over segments on the host, which starves a {device.type} device"
        return dtype_problem(dtype)

    def __call__(
        self,
        q_NHD: Tensor,
        k_MGD: Tensor,
        v_MGD: Tensor,
        segments: Segments,
        *,
        causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        require_packed(q_NHD, k_MGD, v_MGD, segments)
        scale = q_NHD.shape[-1] ** -0.5 if scale is None else scale
        lengths = (segments.lengths_q, segments.lengths_k)
        out_NHD: Tensor = self._attention.apply(q_NHD, k_MGD, v_MGD, lengths, causal, scale)
        return out_NHD


class SegmentTransposed(SegmentGemm):
    """fp32 GEMMs on transposed rows, causal blocks that meet visible keys only. A part of ``SegmentAuto``."""

    name = "segment_transposed"
    _attention = TransposedGemmAttention

    def probe(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        problem = super().probe(device, dtype, head_dim)
        return problem or (None if dtype == torch.float32 else f"computes in float32 only, got {dtype}")


class SegmentSdpa:
    """torch's ``scaled_dot_product_attention`` without a mask: one call for segments of one length, else one each."""

    name = "segment_sdpa"
    preference: int | None = 70

    def probe(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return dtype_problem(dtype)

    def __call__(
        self,
        q_NHD: Tensor,
        k_MGD: Tensor,
        v_MGD: Tensor,
        segments: Segments,
        *,
        causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        require_packed(q_NHD, k_MGD, v_MGD, segments)
        if len(set(segments.lengths_q)) == len(set(segments.lengths_k)) == 1:
            num_segments = len(segments.lengths_q)
            q_SLHD, k_SKGD, v_SKGD = (rows.unflatten(0, (num_segments, -1)) for rows in (q_NHD, k_MGD, v_MGD))
            return _equal_sdpa(q_SLHD, k_SKGD, v_SKGD, causal=causal, scale=scale).flatten(0, 1)
        queries = q_NHD.split(segments.lengths_q)
        keys, values = k_MGD.split(segments.lengths_k), v_MGD.split(segments.lengths_k)
        outputs = [
            _equal_sdpa(q[None], k[None], v[None], causal=causal, scale=scale)[0]
            for q, k, v in zip(queries, keys, values, strict=True)
        ]
        return torch.cat(outputs)


def _equal_sdpa(q_SLHD: Tensor, k_SKGD: Tensor, v_SKGD: Tensor, *, causal: bool, scale: float | None) -> Tensor:
    """Attention of segments of one length, ``[S, L, H, D]``."""
    num_q, num_k = q_SLHD.shape[1], k_SKGD.shape[1]
    num_blind = num_q if num_k == 0 else max(0, num_q - num_k) if causal else 0
    if num_blind == num_q:
        return _zeros_of(q_SLHD)
    if num_blind:
        seeing = _equal_sdpa(q_SLHD[:, num_blind:], k_SKGD, v_SKGD, causal=causal, scale=scale)
        return torch.cat([_zeros_of(q_SLHD[:, :num_blind]), seeing], dim=1)
    mask = None
    if causal and num_q != num_k:
        mask = torch.ones(num_q, num_k, dtype=torch.bool, device=q_SLHD.device).tril(diagonal=num_k - num_q)
    out_SHLD = F.scaled_dot_product_attention(
        q_SLHD.transpose(1, 2),
        k_SKGD.transpose(1, 2),
        v_SKGD.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=q_SLHD.shape[2] != k_SKGD.shape[2],
    )
    return out_SHLD.transpose(1, 2)


def _zeros_of(rows: Tensor) -> Tensor:
    """Zeros that stay in the graph of q with a gradient of zero, NaN or not."""
    return rows.masked_fill(torch.ones((), dtype=torch.bool, device=rows.device), 0.0)


class SegmentAuto:
    """Short segments in one batch, long ones one by one by GEMMs or SDPA, whichever was measured to be faster."""

    name = "segment_auto"
    preference: int | None = 50

    def __init__(self) -> None:
        self._gemm, self._sdpa, self._transposed = SegmentGemm(), SegmentSdpa(), SegmentTransposed()

    def probe(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return self._gemm.probe(device, dtype, head_dim) or self._sdpa.probe(device, dtype, head_dim)

    def __call__(
        self,
        q_NHD: Tensor,
        k_MGD: Tensor,
        v_MGD: Tensor,
        segments: Segments,
        *,
        causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        require_packed(q_NHD, k_MGD, v_MGD, segments)
        if fits_one_batch(q_NHD, segments, causal=causal):
            scale = q_NHD.shape[-1] ** -0.5 if scale is None else scale
            return batched_attention(q_NHD, k_MGD, v_MGD, segments, scale)
        grouped = q_NHD.shape[1] != k_MGD.shape[1]
        backend: SegmentGemm | SegmentSdpa = self._sdpa
        if q_NHD.device.type == "cpu" and transposed_is_faster(q_NHD, segments, causal=causal):
            backend = self._transposed
        elif gemm_is_faster(q_NHD.dtype, grouped, segments.max_k):
            backend = self._gemm
        return backend(q_NHD, k_MGD, v_MGD, segments, causal=causal, scale=scale)


# Channels of a head, and keys a segment, with which transposed GEMMs win in fp32: torch's fused kernel is slow with few
# channels, and computes most of the upper triangle of a causal segment; benchmarks/attention_segment_length.py.
FEW_CHANNELS, FEW_CHANNELS_FROM = 8, 256
CAUSAL_CHANNELS, CAUSAL_FROM = 64, 512


def transposed_is_faster(q_NHD: Tensor, segments: Segments, *, causal: bool) -> bool:
    """Transposed GEMMs against SDPA on a CPU, as measured."""
    if q_NHD.dtype != torch.float32:
        return False
    head_dim, shorter = q_NHD.shape[-1], min(segments.max_q, segments.max_k)
    if head_dim <= FEW_CHANNELS:
        return shorter >= FEW_CHANNELS_FROM
    return causal and head_dim >= CAUSAL_CHANNELS and shorter >= CAUSAL_FROM


# Keys a segment from which bf16 GEMMs win although no heads are folded; benchmarks/attention_segment_length.py.
UNGROUPED_GEMM_FROM = 256


def gemm_is_faster(dtype: torch.dtype, grouped: bool, num_keys: int) -> bool:
    """GEMMs against SDPA on a CPU, as measured: torch's fused kernel is good in fp32 and poor in bf16."""
    return dtype == torch.bfloat16 and (grouped or num_keys >= UNGROUPED_GEMM_FROM)


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
