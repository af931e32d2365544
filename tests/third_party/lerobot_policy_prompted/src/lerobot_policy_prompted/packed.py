# SPDX-License-Identifier: Apache-2.0
"""The same function on packed rows: padding and absent cameras are not computed.

Shape suffixes as in the policy; N computed rows, V rows that exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodix.attention.segments import Segments
from embodix.packing.layout import PackedLayout
from embodix.policies.functional import fill_padded_actions, reduce_valid, valid_elements
from embodix.policies.installation import (
    MethodInstallation,
    require_own_methods,
    require_policy_class,
    require_supported,
)
from embodix.policies.settings import FastPathSettings, TokenCounts
from lerobot_policy_prompted.modeling_prompted import ACTION, PromptedPolicy
from lerobot_policy_prompted.record import Prompted

CAMERA_PAD, ACTION_PAD, ACTION_DIMS = "camera_is_pad", "action_is_pad", "action_dims"


class PromptedFastPath:
    """Training forward and action sampling on packed rows, with the policy's signatures."""

    def __init__(self, policy: PromptedPolicy, settings: FastPathSettings) -> None:
        self.policy, self.settings = policy, settings
        self.token_counts: TokenCounts | None = None

    def forward(self, batch: dict[str, Any], reduction: str = "mean") -> tuple[Tensor, dict[str, Any]]:
        policy = self.policy
        actions_BTA = policy.padded(batch[ACTION], policy.config.max_action_dim)
        is_pad_BT = batch[ACTION_PAD].bool() if self.settings.action_pad == "mask" else None
        if is_pad_BT is not None:
            actions_BTA = fill_padded_actions(actions_BTA, is_pad_BT)
        layout = self._layout(batch)
        self._count(batch, layout)
        losses_BTA = policy.losses(self._seen(batch, layout), actions_BTA)
        losses_B1TA = losses_BTA[:, None, :, : policy.num_action_dims]
        valid_BTA = valid_elements(losses_B1TA, is_pad_BT, batch.get(ACTION_DIMS))
        return reduce_valid(losses_B1TA, valid_BTA, reduction, self.settings.reduce_count)

    def action_elements(self, batch: Mapping[str, Any]) -> int:
        dims_B = batch.get(ACTION_DIMS)
        num_samples, num_steps = batch[ACTION].shape[:2]
        dims_B = torch.full((num_samples,), self.policy.num_action_dims) if dims_B is None else dims_B
        is_pad_BT = batch.get(ACTION_PAD) if self.settings.action_pad == "mask" else None
        steps_B = torch.full((num_samples,), num_steps) if is_pad_BT is None else (~is_pad_BT.bool()).sum(dim=1)
        return int((steps_B * dims_B).sum())

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Any], **kwargs: Any) -> Tensor:
        self.policy.eval()
        seen_BW = self._seen(batch, self._layout(batch))
        chunk_BTA = self.policy.denoise(seen_BW, kwargs.get("noise"), kwargs.get("observe"))
        return chunk_BTA[..., : self.policy.num_action_dims]

    def _layout(self, batch: Mapping[str, Any]) -> PackedLayout:
        """What is computed: no padding, and no patch of a camera that is marked absent."""
        policy = self.policy
        valid_BS = policy.valid(batch)
        absent_BC = batch.get(CAMERA_PAD)
        if absent_BC is not None:
            rows_BR = ~absent_BC.bool().repeat_interleave(policy.num_patches(batch), dim=1)
            valid_BS = torch.cat([rows_BR & valid_BS[:, : rows_BR.shape[1]], valid_BS[:, rows_BR.shape[1] :]], dim=1)
        return self.settings.packer.layout(valid_BS)

    def _seen(self, batch: Mapping[str, Any], layout: PackedLayout) -> Tensor:
        rows_NW = self.policy.embed(batch).flatten(0, 1).index_select(0, layout.rows_N)
        segments = Segments.from_lengths(layout.lengths, layout.lengths)
        for layer in self.policy.layers:
            rows_NW = rows_NW + self._attend(layer.self_attn, layer.input_norm(rows_NW), layout, segments)
            rows_NW = rows_NW + layer.mlp(layer.mlp_norm(rows_NW))
        rows_VW = _existing(self.policy.norm(rows_NW), layout)
        return torch.stack([rows.mean(dim=0) for rows in rows_VW.split(list(layout.lengths))])

    def _attend(self, attention: Any, rows_NW: Tensor, layout: PackedLayout, segments: Segments) -> Tensor:
        q_VHD, k_VHD, v_VHD = (_existing(part, layout) for part in attention.heads(rows_NW))
        attend = self.settings.attention or _each_by_itself
        out_VHD = attend(q_VHD, k_VHD, v_VHD, segments)
        if layout.valid_rows_V is not None:
            out_VHD = out_VHD.new_zeros(rows_NW.shape[0], *out_VHD.shape[1:]).index_copy(
                0, layout.valid_rows_V, out_VHD
            )
        return attention.o_proj(out_VHD.flatten(1))

    def _count(self, batch: Mapping[str, Any], layout: PackedLayout) -> None:
        num_images = layout.batch_size * len(self.policy.cameras(batch))
        absent = batch.get(CAMERA_PAD)
        num_steps = layout.batch_size * self.policy.config.chunk_size
        is_pad = batch.get(ACTION_PAD)
        self.token_counts = TokenCounts(
            valid=layout.num_valid,
            computed=layout.num_computed,
            upstream=layout.batch_size * layout.padded_length,
            images_computed=num_images - (0 if absent is None else int(absent.sum())),
            images_upstream=num_images,
            action_valid=num_steps if is_pad is None else num_steps - int(is_pad.sum()),
            action_total=num_steps,
        )


def _each_by_itself(q_VHD: Tensor, k_VHD: Tensor, v_VHD: Tensor, segments: Segments) -> Tensor:
    """Attention as published, a sample at a time."""
    parts = [part.split(list(segments.lengths_q)) for part in (q_VHD, k_VHD, v_VHD)]
    heads_first = [[rows.transpose(0, 1) for rows in part] for part in parts]
    outputs = [F.scaled_dot_product_attention(q, k, v) for q, k, v in zip(*heads_first, strict=True)]
    return torch.cat([output.transpose(0, 1) for output in outputs])


def _existing(rows: Tensor, layout: PackedLayout) -> Tensor:
    return rows if layout.valid_rows_V is None else rows.index_select(0, layout.valid_rows_V)


class PromptedWrapper:
    """Sets ``forward`` and ``predict_action_chunk`` on the instance."""

    policy_type = Prompted.policy_type
    supported = Prompted.supported

    def head_dim(self, policy: Any) -> int:
        return int(policy.config.width // policy.config.num_heads)

    def install(self, policy: nn.Module, settings: FastPathSettings) -> MethodInstallation:
        require_supported(self.policy_type, self.supported)
        require_policy_class(policy, self.policy_type, PromptedPolicy)
        require_own_methods(policy)
        return MethodInstallation(policy, PromptedFastPath(policy, settings), self.policy_type)
