# SPDX-License-Identifier: Apache-2.0
"""fp32 attention of one segment as plain GEMMs on transposed rows, for CPUs.

A head has few channels and a segment many tokens. GEMMs whose short side is the number of channels run several times
faster when the tokens are the contiguous side, so queries, keys, values and outputs are kept as ``[channels, tokens]``.
Grouped heads are folded into query columns. Scores are formed a block of queries at a time; in causal segments a block
meets only the keys that it may see. Small score matrices are kept for the backward pass, others are formed again.

Shape suffixes: N packed queries, M packed keys, H query heads, G key/value heads, J = H / G heads of a group, D
head_dim, C = N * J query columns of one key/value head, L queries of a block, K keys that they meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Scores of a block: 2**18 fp32 elements are 1 MiB, the L2 cache of one current server core.
BLOCK_ELEMENTS = 2**18
# Tokens of a causal block. Fewer keys are met in vain by smaller blocks, and GEMMs get slower.
CAUSAL_BLOCK_TOKENS = 128
# Scores of one call (64 MiB in fp32) that are kept rather than formed again.
KEPT_ELEMENTS = 2**24


@dataclass(frozen=True)
class _Block:
    """Some query columns of one segment, and the keys that they meet; ``diagonal`` counts keys that all of them see."""

    queries: slice
    keys: slice
    diagonal: int

    @property
    def num_scores(self) -> int:
        return int(self.queries.stop - self.queries.start) * int(self.keys.stop - self.keys.start)


def _blocks(lengths: tuple[tuple[int, ...], tuple[int, ...]], group: int, causal: bool) -> Iterator[_Block]:
    """Every block that has work; queries that see no key are left out (their output stays 0)."""
    start_q = start_k = 0
    for length_q, length_k in zip(*lengths, strict=True):
        blind = max(0, length_q - length_k) if causal else 0
        first = blind if length_k else length_q
        step = max(1, BLOCK_ELEMENTS // max(1, length_k * group))
        if causal:
            step = min(step, CAUSAL_BLOCK_TOKENS)
        for token in range(first, length_q, step):
            stop = min(token + step, length_q)
            offset = length_k - length_q  # a query sees keys up to its own position, counted from the last key
            num_keys = stop + offset if causal else length_k
            yield _Block(
                queries=slice((start_q + token) * group, (start_q + stop) * group),
                keys=slice(start_k, start_k + num_keys),
                diagonal=token + offset if causal else num_keys,
            )
        start_q, start_k = start_q + length_q, start_k + length_k


def _transposed(rows_NHD: Tensor, num_groups: int) -> Tensor:
    """``[G, D, N * J]``: channels first, the heads of a group beside each other."""
    columns_GDC: Tensor = rows_NHD.unflatten(1, (num_groups, -1)).permute(1, 3, 0, 2).flatten(2)
    return columns_GDC.contiguous()


def _rows(columns_GDC: Tensor, group: int) -> Tensor:
    """``[N, H, D]`` from ``_transposed``'s layout."""
    rows_NHD: Tensor = columns_GDC.unflatten(2, (-1, group)).permute(2, 0, 3, 1).flatten(1, 2)
    return rows_NHD


def _probabilities(q_DL: Tensor, k_DK: Tensor, out_LK: Tensor, block: _Block, group: int, scale: float) -> Tensor:
    """Softmax of the scaled scores of a block, in ``out_LK``."""
    torch.addmm(out_LK, q_DL.t(), k_DK, beta=0, alpha=scale, out=out_LK)
    beyond = out_LK[:, block.diagonal :]
    if beyond.shape[1]:
        tokens_L = torch.arange(beyond.shape[0]) // group
        beyond.masked_fill_(torch.arange(beyond.shape[1]) > tokens_L[:, None], float("-inf"))
    return torch.softmax(out_LK, dim=-1, out=out_LK)


class _Scores:
    """Memory for score blocks: one buffer used again and again, or fresh memory that the backward pass keeps."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._flat = like.new_empty(0)

    def block(self, block: _Block) -> Tensor:
        if self._flat.numel() < block.num_scores:
            self._flat = self._like.new_empty(block.num_scores)
        num_keys = block.keys.stop - block.keys.start
        return self._flat[: block.num_scores].view(-1, num_keys)


class TransposedGemmAttention(torch.autograd.Function):
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
        num_groups = k_MGD.shape[1]
        group = q_NHD.shape[1] // num_groups
        q_GDC, k_GDM, v_GDM = (
            _transposed(q_NHD, num_groups),
            _transposed(k_MGD, num_groups),
            _transposed(v_MGD, num_groups),
        )
        out_GDC = torch.zeros_like(q_GDC)
        blocks = list(_blocks(lengths, group, causal))
        keeps = any(ctx.needs_input_grad) and num_groups * sum(b.num_scores for b in blocks) <= KEPT_ELEMENTS
        scores, kept = _Scores(q_GDC), []
        for head in range(num_groups):
            for block in blocks:
                p_LK = _Scores(q_GDC).block(block) if keeps else scores.block(block)
                _probabilities(q_GDC[head, :, block.queries], k_GDM[head, :, block.keys], p_LK, block, group, scale)
                torch.mm(v_GDM[head, :, block.keys], p_LK.t(), out=out_GDC[head, :, block.queries])
                if keeps:
                    kept.append(p_LK)
        ctx.save_for_backward(q_GDC, k_GDM, v_GDM, out_GDC, *kept)
        ctx.blocks, ctx.group, ctx.scale = blocks, group, scale
        return _rows(out_GDC, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHD: Tensor) -> tuple[Tensor | None, ...]:
        q_GDC, k_GDM, v_GDM, out_GDC, *kept = ctx.saved_tensors
        grad_GDC = _transposed(grad_NHD, q_GDC.shape[0])
        dq_GDC, dk_GDM, dv_GDM = torch.zeros_like(q_GDC), torch.zeros_like(k_GDM), torch.zeros_like(v_GDM)
        # Softmax's backward pass subtracts sum(p * dp) of a query, which is its output times the output's gradient.
        shift_GC = (grad_GDC * out_GDC).sum(dim=1).neg_()
        scores, slopes = _Scores(q_GDC), _Scores(q_GDC)
        probabilities = iter(kept)
        for head in range(q_GDC.shape[0]):
            for block in ctx.blocks:
                q_DL, grad_DL = q_GDC[head, :, block.queries], grad_GDC[head, :, block.queries]
                k_DK, v_DK = k_GDM[head, :, block.keys], v_GDM[head, :, block.keys]
                p_LK = next(probabilities, None)
                if p_LK is None:
                    p_LK = _probabilities(q_DL, k_DK, scores.block(block), block, ctx.group, ctx.scale)
                dv_GDM[head, :, block.keys].addmm_(grad_DL, p_LK)
                d_LK = slopes.block(block)
                torch.addmm(shift_GC[head, block.queries, None], grad_DL.t(), v_DK, out=d_LK)
                d_LK.mul_(p_LK)
                torch.addmm(q_DL, k_DK, d_LK.t(), beta=0, alpha=ctx.scale, out=dq_GDC[head, :, block.queries])
                dk_GDM[head, :, block.keys].addmm_(q_DL, d_LK, alpha=ctx.scale)
        return _rows(dq_GDC, ctx.group), _rows(dk_GDM, 1), _rows(dv_GDM, 1), None, None, None
