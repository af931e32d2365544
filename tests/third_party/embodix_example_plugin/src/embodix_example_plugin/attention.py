# SPDX-License-Identifier: Apache-2.0
"""An attention backend that pads the segments to the longest and calls torch's SDPA once with a mask.

Shape suffixes: N packed queries, M packed keys, B segments, Q and K longest segments, H query heads, G key/value heads,
D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from embodix.attention.segments import Segments, dtype_problem, require_packed


class PaddedSdpa:
    """Runs on every device; computes padding, so it is no faster than upstream."""

    name = "padded_sdpa"

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
        q_BHQD = _padded(q_NHD, segments.lengths_q)
        k_BGKD, v_BGKD = (_padded(x_MGD, segments.lengths_k) for x_MGD in (k_MGD, v_MGD))
        visible_BQK = _visible(segments, causal, q_NHD.device)
        out_BHQD = scaled_dot_product_attention(
            q_BHQD, k_BGKD, v_BGKD, attn_mask=visible_BQK[:, None], scale=scale, enable_gqa=True
        )
        sees_any_BQ = visible_BQK.any(dim=-1)
        out_BQHD = out_BHQD.masked_fill(~sees_any_BQ[:, None, :, None], 0.0).transpose(1, 2)
        lengths = enumerate(segments.lengths_q)
        return torch.cat([out_BQHD[index, :length] for index, length in lengths])


def _padded(x_NHD: Tensor, lengths: tuple[int, ...]) -> Tensor:
    return pad_sequence(list(x_NHD.split(lengths)), batch_first=True).transpose(1, 2)


def _visible(segments: Segments, causal: bool, device: torch.device) -> Tensor:
    """Bool ``[B, Q, K]``: which key each query may see; a causal mask is aligned to the last key."""
    lengths_B = torch.tensor(segments.lengths_k, device=device)
    key_K = torch.arange(segments.max_k, device=device)
    visible_BQK = (key_K < lengths_B[:, None])[:, None].expand(-1, segments.max_q, -1)
    if not causal:
        return visible_BQK
    shift_B = lengths_B - torch.tensor(segments.lengths_q, device=device)
    last_BQ = torch.arange(segments.max_q, device=device) + shift_B[:, None]
    return visible_BQK & (key_K <= last_BQ[..., None])
