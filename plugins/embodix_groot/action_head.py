# SPDX-License-Identifier: Apache-2.0
"""The action head: self-attention over the features, and the diffusion transformer (DiT) that reads them.

Sources: lerobot/policies/groot/action_head/{flow_matching_action_head,cross_attention_dit}.py and diffusers'
``Attention``. The features stay packed; the action side is dense, K tokens a sequence (state, future, actions).

Shape suffixes: B samples, R action sequences (samples x flow samples), N computed rows, W width of the features, K
tokens of one action sequence, E width of the DiT, T action steps, A padded action dimensions, H heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embodix_groot.attention import TokenAttention

KeysValues = list[tuple[Tensor, Tensor] | None]


def num_action_tokens(head: Any, num_states: int) -> int:
    """Tokens of one action sequence: state, future and action tokens."""
    return num_states + int(head.future_tokens.num_embeddings) + int(head.action_horizon)


def encode_context(head: Any, features_NW: Tensor, positions_N: Tensor, attention: TokenAttention) -> Tensor:
    """``[N, W]`` context of the DiT (upstream: ``process_backbone_output``)."""
    rows_NW = head.vlln(features_NW)
    if isinstance(head.vl_self_attention, torch.nn.Identity):
        return rows_NW

    def attend(projections: Any, normed_NW: Tensor) -> Tensor:
        q_NHD, k_NHD, v_NHD = (
            _heads(projection(normed_NW), projections.heads)
            for projection in (projections.to_q, projections.to_k, projections.to_v)
        )
        return _project_out(projections, attention.among_tokens(q_NHD, k_NHD, v_NHD, causal=False))

    for block in head.vl_self_attention.transformer_blocks:
        normed_NW = block.norm1(rows_NW)
        if block.pos_embed is not None:
            normed_NW = normed_NW + block.pos_embed.pe[0].index_select(0, positions_N.clamp(min=0))
        rows_NW = _rest_of_block(block, rows_NW, attend(block.attn1, normed_NW))
    return rows_NW


def context_keys_values(dit: Any, context_NW: Tensor) -> KeysValues:
    """Keys and values of the context for each block of the DiT, None where it attends to the action side only."""
    pairs: KeysValues = []
    for index, block in enumerate(dit.transformer_blocks):
        if reads_context(dit, index):
            heads = block.attn1.heads
            pairs.append((_heads(block.attn1.to_k(context_NW), heads), _heads(block.attn1.to_v(context_NW), heads)))
        else:
            pairs.append(None)
    return pairs


def reads_context(dit: Any, index: int) -> bool:
    """Whether a block attends to the context (upstream: even blocks, or all without interleaving)."""
    return index % 2 == 0 or not dit.config.interleave_self_attention


def embed_actions(
    head: Any, state_R1E: Tensor, actions_RTA: Tensor, timesteps_R: Tensor, embodiments_R: Tensor
) -> Tensor:
    """``[R, K, E]`` input of the DiT: state, future tokens, noisy actions."""
    actions_RTE = head.action_encoder(actions_RTA, timesteps_R, embodiments_R)
    if head.config.add_pos_embed:
        steps_T = torch.arange(actions_RTE.shape[1], device=actions_RTE.device)
        actions_RTE = actions_RTE + head.position_embedding(steps_T)
    # Looked up, for a module's own weight may be sharded outside of its forward (FSDP).
    tokens_F = torch.arange(head.future_tokens.num_embeddings, device=actions_RTE.device)
    future_RFE = head.future_tokens(tokens_F).expand(actions_RTE.shape[0], -1, -1)
    return torch.cat((state_R1E, future_RFE, actions_RTE), dim=1)


def predict_velocity(
    head: Any,
    sequence_RKE: Tensor,
    keys_values: KeysValues,
    timesteps_R: Tensor,
    embodiments_R: Tensor,
    attention: TokenAttention,
) -> Tensor:
    """``[R, T, A]`` velocity of the action tokens (upstream: ``DiT.forward`` and the action decoder)."""
    features_RTW = action_features(head, sequence_RKE, keys_values, timesteps_R, attention)
    velocity_RTA: Tensor = head.action_decoder(features_RTW, embodiments_R)
    return velocity_RTA


def action_features(
    head: Any, sequence_RKE: Tensor, keys_values: KeysValues, timesteps_R: Tensor, attention: TokenAttention
) -> Tensor:
    """``[R, T, W]`` what the action decoder reads of the action tokens (upstream: ``DiT.forward``)."""
    dit = head.model
    condition_RE = dit.timestep_encoder(timesteps_R)
    for block, pair in zip(dit.transformer_blocks, keys_values, strict=True):
        adaptive = block.norm_type == "ada_norm"
        normed_RKE = block.norm1(sequence_RKE, condition_RE) if adaptive else block.norm1(sequence_RKE)
        if block.pos_embed is not None:
            normed_RKE = block.pos_embed(normed_RKE)
        if pair is None:
            attended_RKE = block.attn1(normed_RKE)
        else:
            attended_RKE = _over_context(block.attn1, normed_RKE, pair, attention)
        sequence_RKE = _rest_of_block(block, sequence_RKE, attended_RKE)
    actions_RTE = sequence_RKE[:, -head.action_horizon :]
    shift_RE, scale_RE = dit.proj_out_1(F.silu(condition_RE)).chunk(2, dim=1)
    actions_RTE = dit.norm_out(actions_RTE) * (1 + scale_RE[:, None]) + shift_RE[:, None]
    features_RTW: Tensor = dit.proj_out_2(actions_RTE)
    return features_RTW


def _over_context(
    projections: Any, normed_RKE: Tensor, pair: tuple[Tensor, Tensor], attention: TokenAttention
) -> Tensor:
    q_RKHD = _heads(projections.to_q(normed_RKE), projections.heads)
    out_RKHD = attention.over_tokens(q_RKHD.flatten(0, 1), *pair).view_as(q_RKHD)
    return _project_out(projections, out_RKHD)


def _rest_of_block(block: Any, rows: Tensor, attended: Tensor) -> Tensor:
    """Residual and feed-forward, with the dropouts in upstream's order."""
    if block.final_dropout:
        attended = block.final_dropout(attended)
    hidden = attended + rows
    return block.ff(block.norm3(hidden)) + hidden


def _project_out(projections: Any, heads: Tensor) -> Tensor:
    linear, dropout = projections.to_out
    return dropout(linear(heads.flatten(-2)))


def _heads(rows: Tensor, num_heads: int) -> Tensor:
    return rows.unflatten(-1, (num_heads, -1))
