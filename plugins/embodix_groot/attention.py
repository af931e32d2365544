# SPDX-License-Identifier: Apache-2.0
"""GR00T's attention over the tokens of each sample, and of the action tokens over them.

``VarlenTokens`` computes valid tokens with a variable-length backend; ``DenseTokens`` is torch's dense attention on the
padded batch with the mask that upstream leaves out in the action head. Rows that are no tokens get 0.

Shape suffixes: B samples, L rows of the padded prompt, N computed rows, V valid rows, M action-side queries of all
samples, K of one sample, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from embodix.attention.segments import Segments
from embodix.contracts import AttentionBackend
from embodix.packing.layout import PackedLayout


class TokenAttention(Protocol):
    """The attention of one step; boundaries and masks are made once for all layers."""

    def among_tokens(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, *, causal: bool) -> Tensor:
        """Tokens of a sample among themselves, ``[N, H, D]``."""
        ...

    def over_tokens(self, q_MHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        """Queries (the same number a sample) over the tokens of their sample, ``[M, H, D]``."""
        ...


class VarlenTokens:
    """Variable-length calls; nothing is computed for padding."""

    def __init__(
        self, backend: AttentionBackend, layout: PackedLayout, queries_a_sample: int, device: torch.device
    ) -> None:
        self._backend = backend
        self._valid_rows_V = layout.valid_rows_V
        self._token_segments = Segments.from_lengths(layout.lengths, layout.lengths, device)
        num_queries = [queries_a_sample] * layout.batch_size
        self._query_segments = Segments.from_lengths(num_queries, layout.lengths, device)

    def among_tokens(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, *, causal: bool) -> Tensor:
        q_VHD, k_VGD, v_VGD = _one_dtype(self._valid(q_NHD), self._valid(k_NGD), self._valid(v_NGD))
        out_VHD = self._backend(q_VHD, k_VGD, v_VGD, self._token_segments, causal=causal)
        if self._valid_rows_V is None:
            return out_VHD
        return out_VHD.new_zeros(q_NHD.shape).index_copy(0, self._valid_rows_V, out_VHD)

    def over_tokens(self, q_MHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        q_MHD, k_VGD, v_VGD = _one_dtype(q_MHD, self._valid(k_NGD), self._valid(v_NGD))
        return self._backend(q_MHD, k_VGD, v_VGD, self._query_segments)

    def _valid(self, rows: Tensor) -> Tensor:
        return rows if self._valid_rows_V is None else rows.index_select(0, self._valid_rows_V)


class DenseTokens:
    """torch's dense attention; packed rows are spread out over the padded batch for it and gathered again."""

    def __init__(self, layout: PackedLayout, device: torch.device) -> None:
        self._rows_N = layout.rows_N
        self._shape = (layout.batch_size, layout.padded_length)
        valid_rows_V = layout.rows_N if layout.valid_rows_V is None else layout.rows_N[layout.valid_rows_V]
        valid_S = torch.zeros(layout.batch_size * layout.padded_length, dtype=torch.bool, device=device)
        valid_BL = valid_S.index_fill(0, valid_rows_V, True).view(self._shape)
        self._key_mask = valid_BL[:, None, None, :]
        causal_LL = torch.ones(layout.padded_length, layout.padded_length, dtype=torch.bool, device=device).tril()
        # A row of padding sees itself, so that no row is without a key.
        itself_LL = torch.eye(layout.padded_length, dtype=torch.bool, device=device)
        self._token_masks = {
            causal: ((self._key_mask & valid_BL[:, None, :, None]) & (causal_LL if causal else True)) | itself_LL
            for causal in (False, True)
        }

    def among_tokens(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, *, causal: bool) -> Tensor:
        q_BHLD, k_BGLD, v_BGLD = (self._spread(rows) for rows in _one_dtype(q_NHD, k_NGD, v_NGD))
        out_BHLD = _dense_attention(q_BHLD, k_BGLD, v_BGLD, self._token_masks[causal])
        return out_BHLD.transpose(1, 2).flatten(0, 1).index_select(0, self._rows_N)

    def over_tokens(self, q_MHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        q_MHD, k_NGD, v_NGD = _one_dtype(q_MHD, k_NGD, v_NGD)
        q_BHKD = q_MHD.unflatten(0, (self._shape[0], -1)).transpose(1, 2)
        out_BHKD = _dense_attention(q_BHKD, self._spread(k_NGD), self._spread(v_NGD), self._key_mask)
        return out_BHKD.transpose(1, 2).flatten(0, 1)

    def _spread(self, rows_NHD: Tensor) -> Tensor:
        """Packed rows in the padded batch, ``[B, H, L, D]``, zeros where nothing was computed."""
        padded = rows_NHD.new_zeros(self._shape[0] * self._shape[1], *rows_NHD.shape[1:])
        return padded.index_copy(0, self._rows_N, rows_NHD).unflatten(0, self._shape).transpose(1, 2)


def _dense_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    grouped = queries.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=grouped)


def _one_dtype(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast norms widen queries and keys; values keep the dtype that attention computes in."""
    return queries.to(values.dtype), keys.to(values.dtype), values
