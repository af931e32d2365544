# SPDX-License-Identifier: Apache-2.0
"""Attention of one segment as plain GEMMs with grouped heads folded into query rows.

Query heads that share a key/value head become extra query rows, so K and V are never expanded and one GEMM serves
the whole group. Scores are formed a block of rows at a time in one reused buffer and formed again in the backward
pass (Dao et al., FlashAttention, 2022): the ``[rows, keys]`` matrix is never stored.

Shape suffixes: N packed queries, M packed keys, H query heads, G key/value heads, D head_dim, L query rows of one
segment and key/value head (tokens x heads of the group), K keys of one segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Scores kept at a time. 2**18 fp32 elements are 1 MiB, the L2 cache of one current server core.
SCORE_BLOCK_ELEMENTS = 2**18


@dataclass(frozen=True)
class _Piece:
    """The queries and keys of one segment and one key/value head."""

    queries: slice
    keys: slice
    head_k: int
    heads_q: slice
    num_tokens: int
    num_keys: int


def _pieces(
    lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], num_groups: int, group: int, causal: bool
) -> Iterator[_Piece]:
    """Every piece that has work; queries that see no key are left out (their output stays 0)."""
    start_q = start_k = 0
    for length_q, length_k in zip(lengths_q, lengths_k, strict=True):
        first_q = start_q + (max(0, length_q - length_k) if causal else 0)
        num_tokens = start_q + length_q - first_q
        if num_tokens and length_k:
            for head_k in range(num_groups):
                yield _Piece(
                    queries=slice(first_q, start_q + length_q),
                    keys=slice(start_k, start_k + length_k),
                    head_k=head_k,
                    heads_q=slice(head_k * group, (head_k + 1) * group),
                    num_tokens=num_tokens,
                    num_keys=length_k,
                )
        start_q, start_k = start_q + length_q, start_k + length_k


def _rows(tensor_NHD: Tensor, piece: _Piece) -> Tensor:
    """``[L, D]`` query rows of a piece; a view when one key/value head serves all query heads."""
    return tensor_NHD[piece.queries, piece.heads_q].reshape(-1, tensor_NHD.shape[-1])


def _write_rows(tensor_NHD: Tensor, piece: _Piece, rows_LD: Tensor) -> None:
    """Store rows; nothing to do when they already are a view of the tensor."""
    target = tensor_NHD[piece.queries, piece.heads_q]
    if rows_LD.data_ptr() != target.data_ptr():
        target.copy_(rows_LD.view(target.shape))


def _row_blocks(num_rows: int, num_keys: int) -> Iterator[slice]:
    step = max(1, SCORE_BLOCK_ELEMENTS // num_keys)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _probabilities(
    q_LD: Tensor, k_KD: Tensor, out_LK: Tensor, rows: slice, piece: _Piece, causal: bool, scale: float
) -> Tensor:
    """Softmax of the scaled scores of some rows, in ``out_LK``."""
    torch.addmm(out_LK, q_LD, k_KD.t(), beta=0, alpha=scale, out=out_LK)
    if causal:
        group = piece.heads_q.stop - piece.heads_q.start
        token_L = torch.arange(rows.start, rows.stop, device=q_LD.device) // group
        last_visible_L = token_L + (piece.num_keys - piece.num_tokens)
        hidden_LK = torch.arange(piece.num_keys, device=q_LD.device) > last_visible_L[:, None]
        out_LK.masked_fill_(hidden_LK, float("-inf"))
    return torch.softmax(out_LK, dim=-1, out=out_LK)


class FoldedGemmAttention(torch.autograd.Function):
    """Segment attention with its own backward pass; see the module docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        q_NHD: Tensor,
        k_MGD: Tensor,
        v_MGD: Tensor,
        lengths: tuple[tuple[int, ...], tuple[int, ...]],
        causal: bool,
        scale: float,
    ) -> Tensor:
        q_NHD, k_MGD, v_MGD = q_NHD.contiguous(), k_MGD.contiguous(), v_MGD.contiguous()
        ctx.save_for_backward(q_NHD, k_MGD, v_MGD)
        ctx.lengths, ctx.causal, ctx.scale = lengths, causal, scale
        out_NHD = torch.zeros_like(q_NHD)
        num_groups = k_MGD.shape[1]
        scores = _ScoreBuffer(q_NHD)
        group = q_NHD.shape[1] // num_groups
        for piece in _pieces(*lengths, num_groups, group, causal):
            q_LD, out_LD = _rows(q_NHD, piece), _rows(out_NHD, piece)
            k_KD, v_KD = k_MGD[piece.keys, piece.head_k], v_MGD[piece.keys, piece.head_k]
            for rows in _row_blocks(q_LD.shape[0], piece.num_keys):
                p_LK = scores.block(rows, piece.num_keys)
                _probabilities(q_LD[rows], k_KD, p_LK, rows, piece, causal, scale)
                torch.mm(p_LK, v_KD, out=out_LD[rows])
            _write_rows(out_NHD, piece, out_LD)
        return out_NHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHD: Tensor) -> tuple[Tensor | None, ...]:
        q_NHD, k_MGD, v_MGD = ctx.saved_tensors
        grad_NHD = grad_NHD.contiguous()
        dq_NHD = torch.zeros_like(q_NHD)
        dk_MGD, dv_MGD = torch.zeros_like(k_MGD), torch.zeros_like(v_MGD)
        num_groups = k_MGD.shape[1]
        scores, slopes = _ScoreBuffer(q_NHD), _ScoreBuffer(q_NHD)
        group = q_NHD.shape[1] // num_groups
        lengths_q, lengths_k = ctx.lengths
        for piece in _pieces(lengths_q, lengths_k, num_groups, group, ctx.causal):
            q_LD, grad_LD, dq_LD = _rows(q_NHD, piece), _rows(grad_NHD, piece), _rows(dq_NHD, piece)
            k_KD, v_KD = k_MGD[piece.keys, piece.head_k], v_MGD[piece.keys, piece.head_k]
            dk_KD = torch.zeros_like(k_KD, dtype=torch.float32)
            dv_KD = torch.zeros_like(v_KD, dtype=torch.float32)
            for rows in _row_blocks(q_LD.shape[0], piece.num_keys):
                p_LK, d_LK = scores.block(rows, piece.num_keys), slopes.block(rows, piece.num_keys)
                _probabilities(q_LD[rows], k_KD, p_LK, rows, piece, ctx.causal, ctx.scale)
                _accumulate(dv_KD, p_LK, grad_LD[rows], 1.0)
                torch.mm(grad_LD[rows], v_KD.t(), out=d_LK)
                torch.ops.aten._softmax_backward_data.out(d_LK, p_LK, -1, q_NHD.dtype, grad_input=d_LK)
                torch.addmm(dq_LD[rows], d_LK, k_KD, beta=0, alpha=ctx.scale, out=dq_LD[rows])
                _accumulate(dk_KD, d_LK, q_LD[rows], ctx.scale)
            _write_rows(dq_NHD, piece, dq_LD)
            dk_MGD[piece.keys, piece.head_k].copy_(dk_KD)
            dv_MGD[piece.keys, piece.head_k].copy_(dv_KD)
        return dq_NHD, dk_MGD, dv_MGD, None, None, None


class _ScoreBuffer:
    """One buffer of scores, reused for every block of a pass."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._flat = like.new_empty(0)

    def block(self, rows: slice, num_keys: int) -> Tensor:
        size = (rows.stop - rows.start) * num_keys
        if self._flat.numel() < size:
            self._flat = self._like.new_empty(max(size, SCORE_BLOCK_ELEMENTS))
        return self._flat[:size].view(rows.stop - rows.start, num_keys)


def _accumulate(total_KD: Tensor, weights_LK: Tensor, rows_LD: Tensor, scale: float) -> None:
    """``total += scale * weights.T @ rows``, summed over blocks in fp32."""
    if total_KD.dtype == weights_LK.dtype:
        total_KD.addmm_(weights_LK.t(), rows_LD, alpha=scale)
    else:
        total_KD.add_(weights_LK.t() @ rows_LD, alpha=scale)
