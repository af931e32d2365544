# SPDX-License-Identifier: Apache-2.0
"""Where the samples of a packed batch begin and end, and the checks that all attention backends share.

Shape suffixes: N packed queries, M packed keys, H query heads, G key/value heads (H is a multiple of G), D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class PaddedRows:
    """Where packed rows stand when all segments are padded to the longest.

    Attributes:
        rows: int64 index into the flattened ``[num_segments * longest]`` rows; None when no segment is padded.
        valid: bool ``[num_segments, longest]``.
    """

    num_segments: int
    longest: int
    rows: Tensor | None
    valid: Tensor

    @classmethod
    def from_lengths(cls, lengths: tuple[int, ...], device: torch.device) -> PaddedRows:
        """The padded layout of packed segments with these lengths."""
        longest = max(lengths)
        valid = torch.arange(longest) < torch.tensor(lengths)[:, None]
        rows = None if min(lengths) == longest else valid.flatten().nonzero().squeeze(1).to(device)
        return cls(len(lengths), longest, rows, valid.to(device))

    def additive_mask(self, dtype: torch.dtype) -> Tensor:
        """0 where a row exists and -inf where it does not."""
        return torch.where(self.valid, 0.0, float("-inf")).to(dtype)


@dataclass(frozen=True)
class Segments:
    """Boundaries of packed queries and keys; query segment i sees key segment i and nothing else.

    Built once a step, so that no layer waits for the device. Lengths are kept on the host beside the int32
    ``cu_seqlens`` that variable-length kernels take.
    """

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_q: int
    max_k: int

    @classmethod
    def from_lengths(
        cls, lengths_q: Sequence[int], lengths_k: Sequence[int], device: torch.device | str = "cpu"
    ) -> Segments:
        """Segments with these lengths.

        Raises:
            ValueError: different numbers of query and key segments, none at all, or a negative length.
        """
        if len(lengths_q) != len(lengths_k) or not lengths_q:
            raise ValueError(
                "Every query segment needs one key segment and there must be one at least; got "
                f"{len(lengths_q)} query and {len(lengths_k)} key segments."
            )
        if min(*lengths_q, *lengths_k) < 0:
            raise ValueError(f"Segment lengths can't be negative; got q {lengths_q} and k {lengths_k}.")
        return cls(
            lengths_q=tuple(lengths_q),
            lengths_k=tuple(lengths_k),
            cu_seqlens_q=cumulative_lengths(lengths_q, device),
            cu_seqlens_k=cumulative_lengths(lengths_k, device),
            max_q=max(lengths_q),
            max_k=max(lengths_k),
        )

    @cached_property
    def padded_q(self) -> PaddedRows:
        """The queries' padded layout, made on first use and shared by all layers."""
        return PaddedRows.from_lengths(self.lengths_q, self.cu_seqlens_q.device)

    @cached_property
    def padded_k(self) -> PaddedRows:
        """The keys' padded layout, made on first use and shared by all layers."""
        return PaddedRows.from_lengths(self.lengths_k, self.cu_seqlens_k.device)


def cumulative_lengths(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """int32 ``[0, l0, l0 + l1, ...]``."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


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
