# SPDX-License-Identifier: Apache-2.0
"""Backends that walk over the segments: plain GEMMs, torch SDPA, or the faster of both by segment length.

Shape suffixes: N packed queries, M packed keys, S segments of L queries and K keys each, H query heads, G key/value
heads, D head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from embodix.attention.backend import dtype_problem, require_packed
from embodix.attention.folded_gemm import FoldedGemmAttention
from embodix.attention.segment_batch import batched_attention, fits_one_batch
from embodix.attention.segments import Segments
from embodix.attention.transposed_gemm import TransposedGemmAttention


class SegmentGemm:
    """Two GEMMs and a softmax a segment, grouped heads folded into query rows. Made for CPUs."""

    name = "segment_gemm"
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
