# SPDX-License-Identifier: Apache-2.0
"""π0.5's prefix-LM attention: prefix tokens see their prefix, action tokens see their prefix and each other.

``VarlenPrefixLm`` computes it as two mask-free variable-length calls (the query sets are disjoint, so nothing needs
merging); ``DensePrefixLm`` is upstream's dense eager attention.

Shape suffixes: B samples, F flow samples an observation, T action tokens, N computed prefix rows, V valid prefix
rows, S rows of the padded prefix, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from embodix.attention.segments import Segments
from embodix.contracts import AttentionBackend
from embodix.packing.layout import PackedLayout


class PrefixLm(Protocol):
    """The attention of one step; indices, boundaries and masks are made once for all layers."""

    def prefix(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, scale: float) -> Tensor: ...

    def suffix(
        self, q_RHD: Tensor, prefix_kv: tuple[Tensor, Tensor], suffix_kv: tuple[Tensor, Tensor], scale: float
    ) -> Tensor: ...


class VarlenPrefixLm:
    """Two variable-length calls a layer; all indices and boundaries are made once a step."""

    def __init__(
        self, backend: AttentionBackend, layout: PackedLayout, num_flow: int, num_actions: int, device: torch.device
    ) -> None:
        self._backend = backend
        self._valid_rows_V = layout.valid_rows_V
        self._num_computed = layout.num_computed
        self._prefix_segments = Segments.from_lengths(layout.lengths, layout.lengths, device)
        repeated = [length for length in layout.computed_lengths for _ in range(num_flow)]
        self._suffix_segments = Segments.from_lengths(
            [num_actions] * len(repeated), [length + num_actions for length in repeated], device
        )
        self._joint_rows = _interleave(layout.computed_lengths, num_flow, num_actions).to(device)

    def prefix(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, scale: float) -> Tensor:
        """Prefix rows among themselves, ``[N, H, D]``; rows that are no tokens get 0."""
        q_VHD, k_VGD, v_VGD = self._valid(q_NHD), self._valid(k_NGD), self._valid(v_NGD)
        out_VHD = self._backend(q_VHD, k_VGD, v_VGD, self._prefix_segments, scale=scale)
        if self._valid_rows_V is None:
            return out_VHD
        return out_VHD.new_zeros(q_NHD.shape).index_copy(0, self._valid_rows_V, out_VHD)

    def suffix(
        self, q_RHD: Tensor, prefix_kv: tuple[Tensor, Tensor], suffix_kv: tuple[Tensor, Tensor], scale: float
    ) -> Tensor:
        """Action tokens (R = B * F * T rows) over their prefix and themselves, ``[R, H, D]``."""
        keys, values = (
            torch.cat([self._valid(prefix_MGD), suffix_MGD]).index_select(0, self._joint_rows)
            for prefix_MGD, suffix_MGD in zip(prefix_kv, suffix_kv, strict=True)
        )
        return self._backend(q_RHD, keys, values, self._suffix_segments, scale=scale)

    def _valid(self, rows: Tensor) -> Tensor:
        return rows if self._valid_rows_V is None else rows.index_select(0, self._valid_rows_V)


def _interleave(lengths: tuple[int, ...], num_flow: int, num_actions: int) -> Tensor:
    """Rows of ``[all prefixes; all suffixes]`` in the order prefix 0, suffix 0, prefix 1, suffix 1, ..."""
    num_valid = sum(lengths)
    rows, start, suffix = [], 0, num_valid
    for length in lengths:
        for _ in range(num_flow):
            rows += [torch.arange(start, start + length), torch.arange(suffix, suffix + num_actions)]
            suffix += num_actions
        start += length
    return torch.cat(rows)


class DensePrefixLm:
    """Upstream's eager attention on the padded batch; packed rows are spread out for it and gathered again."""

    def __init__(
        self, layout: PackedLayout, num_flow: int, num_actions: int, device: torch.device, attention_module: Any
    ) -> None:
        from lerobot.utils.constants import OPENPI_ATTENTION_MASK_VALUE
        from transformers.models.gemma import modeling_gemma

        self._eager: Callable[..., tuple[Tensor, Tensor]] = modeling_gemma.eager_attention_forward
        self._module = attention_module
        self._rows_N = layout.rows_N
        self._shape = (len(layout.computed_lengths), layout.padded_length)
        valid_rows = layout.rows_N if layout.valid_rows_V is None else layout.rows_N[layout.valid_rows_V]
        valid_S = torch.zeros(self._shape[0] * self._shape[1], dtype=torch.bool, device=device)
        valid_BS = valid_S.index_fill(0, valid_rows, True).view(self._shape)
        self._prefix_mask = _additive(valid_BS[:, None, :] & valid_BS[:, :, None], OPENPI_ATTENTION_MASK_VALUE)
        self._suffix_mask = _additive(_suffix_sees(valid_BS, num_flow, num_actions), OPENPI_ATTENTION_MASK_VALUE)

    def prefix(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, scale: float) -> Tensor:
        """Prefix rows among themselves, ``[N, H, D]``."""
        q_BHSD, k_BGSD, v_BGSD = (self._spread(rows) for rows in (q_NHD, k_NGD, v_NGD))
        out_BSHD, _ = self._eager(self._module, q_BHSD, k_BGSD, v_BGSD, self._prefix_mask, scale)
        out_XHD = F.pad(out_BSHD.flatten(0, 1), (0, 0, 0, 0, 0, 1))  # what a blank row may take
        return out_XHD.index_select(0, self._rows_N)

    def suffix(
        self, q_RHD: Tensor, prefix_kv: tuple[Tensor, Tensor], suffix_kv: tuple[Tensor, Tensor], scale: float
    ) -> Tensor:
        """Action tokens (R = B * F * T rows) over their prefix and themselves, ``[R, H, D]``."""
        batch_size = self._shape[0]
        keys, values = (
            torch.cat([self._spread(prefix), suffix.unflatten(0, (batch_size, -1)).transpose(1, 2)], dim=2)
            for prefix, suffix in zip(prefix_kv, suffix_kv, strict=True)
        )
        queries = q_RHD.unflatten(0, (batch_size, -1)).transpose(1, 2)
        out_BRHD, _ = self._eager(self._module, queries, keys, values, self._suffix_mask, scale)
        return out_BRHD.flatten(0, 1)

    def _spread(self, rows_NHD: Tensor) -> Tensor:
        """Packed rows in the padded batch, ``[B, H, S, D]``, zeros where nothing was computed.

        Blank rows go where no token is: behind the last sample, or into a blank one.
        """
        num_rows = self._shape[0] * self._shape[1]
        padded = rows_NHD.new_zeros(num_rows + 1, *rows_NHD.shape[1:]).index_copy(0, self._rows_N, rows_NHD)
        return padded[:num_rows].unflatten(0, self._shape).transpose(1, 2)


def _suffix_sees(valid_BS: Tensor, num_flow: int, num_actions: int) -> Tensor:
    """``[B, F * T, S + F * T]``: action tokens see the prefix and the action tokens of their own flow sample."""
    flow = torch.arange(num_flow, device=valid_BS.device).repeat_interleave(num_actions)
    same_flow = flow[:, None] == flow[None, :]
    batch_size = valid_BS.shape[0]
    prefix_part = valid_BS[:, None, :].expand(-1, num_flow * num_actions, -1)
    return torch.cat([prefix_part, same_flow.expand(batch_size, -1, -1)], dim=2)


def _additive(visible: Tensor, hidden_value: float) -> Tensor:
    """The additive mask that upstream's eager attention takes, ``[B, 1, queries, keys]``."""
    return torch.where(visible[:, None], 0.0, hidden_value)
