# SPDX-License-Identifier: Apache-2.0
"""The action head: self-attention over the features, the diffusion transformer (DiT) that reads them, loss and sampler.

Sources: lerobot/policies/groot/action_head/{flow_matching_action_head,cross_attention_dit}.py and diffusers'
``Attention``. The features stay packed; the action side is dense, K tokens a sequence (state, future, actions). A
sampler computes features, context and its keys and values once, then the denoising steps.

Shape suffixes: B samples, F flow samples an observation, R = B * F action sequences, N computed rows, W width of the
features, K tokens of one action sequence, E width of the DiT, T action steps, A padded action dimensions, H heads, D
head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embodix.policies.settings import DenoisingObserver
from embodix.policies.units import call_unit
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

    for block in head.vl_self_attention.transformer_blocks:
        rows_NW = call_unit(block, _context_block, rows_NW, positions_N, attention)
    return rows_NW


def _context_block(block: Any, rows_NW: Tensor, positions_N: Tensor, attention: TokenAttention) -> Tensor:
    normed_NW, projections = block.norm1(rows_NW), block.attn1
    if block.pos_embed is not None:
        normed_NW = normed_NW + block.pos_embed.pe[0].index_select(0, positions_N.clamp(min=0))
    q_NHD, k_NHD, v_NHD = (
        _heads(projection(normed_NW), projections.heads)
        for projection in (projections.to_q, projections.to_k, projections.to_v)
    )
    attended_NW = _project_out(projections, attention.among_tokens(q_NHD, k_NHD, v_NHD, causal=False))
    return _rest_of_block(block, rows_NW, attended_NW)


def context_keys_values(dit: Any, context_NW: Tensor) -> KeysValues:
    """Keys and values of the context for each block of the DiT, None where it attends to the action side only."""
    pairs: KeysValues = []
    for index, block in enumerate(dit.transformer_blocks):
        pairs.append(call_unit(block, _keys_values, context_NW) if reads_context(dit, index) else None)
    return pairs


def _keys_values(block: Any, context_NW: Tensor) -> tuple[Tensor, Tensor]:
    projections = block.attn1
    k_NE, v_NE = projections.to_k(context_NW), projections.to_v(context_NW)
    return _heads(k_NE, projections.heads), _heads(v_NE, projections.heads)


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
        sequence_RKE = call_unit(block, _action_block, sequence_RKE, condition_RE, pair, attention)
    actions_RTE = sequence_RKE[:, -head.action_horizon :]
    shift_RE, scale_RE = dit.proj_out_1(F.silu(condition_RE)).chunk(2, dim=1)
    actions_RTE = dit.norm_out(actions_RTE) * (1 + scale_RE[:, None]) + shift_RE[:, None]
    features_RTW: Tensor = dit.proj_out_2(actions_RTE)
    return features_RTW


def _action_block(
    block: Any,
    sequence_RKE: Tensor,
    condition_RE: Tensor,
    pair: tuple[Tensor, Tensor] | None,
    attention: TokenAttention,
) -> Tensor:
    adaptive = block.norm_type == "ada_norm"
    normed_RKE = block.norm1(sequence_RKE, condition_RE) if adaptive else block.norm1(sequence_RKE)
    if block.pos_embed is not None:
        normed_RKE = block.pos_embed(normed_RKE)
    attended_RKE = block.attn1(normed_RKE) if pair is None else _over_context(block.attn1, normed_RKE, pair, attention)
    return _rest_of_block(block, sequence_RKE, attended_RKE)


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


def draw_noise_and_time(head: Any, actions_BTA: Tensor, num_flow: int) -> tuple[Tensor, Tensor]:
    """``[B, F, T, A]`` noise and ``[B, F]`` time by upstream's calls, noise first as upstream draws them."""
    draws = [
        (
            torch.randn(actions_BTA.shape, device=actions_BTA.device, dtype=actions_BTA.dtype),
            head.sample_time(actions_BTA.shape[0], device=actions_BTA.device, dtype=actions_BTA.dtype),
        )
        for _ in range(num_flow)
    ]
    noise, time = zip(*draws, strict=True)
    return torch.stack(noise, dim=1), torch.stack(time, dim=1)


def flow_matching_losses(
    head: Any,
    features_NW: Tensor,
    positions_N: Tensor,
    inputs: Any,
    draw: Callable[[Tensor], tuple[Tensor, Tensor]],
    attention: TokenAttention,
) -> Tensor:
    """``[B, F, T, A]`` squared error of the velocity field, before upstream's ``action_mask``.

    Args:
        inputs: the prepared batch: ``state``, ``action`` and ``embodiment_id``.
        draw: noise ``[B, F, T, A]`` and time ``[B, F]`` for actions ``[B, T, A]``.
    """
    head.set_frozen_modules_to_eval_mode()
    context_NW = encode_context(head, features_NW, positions_N, attention)
    state_B1E = head.state_encoder(inputs["state"], inputs["embodiment_id"])
    actions_BTA = inputs["action"]
    noise_BFTA, time_BF = draw(actions_BTA)
    num_flow = noise_BFTA.shape[1]
    actions_B1TA, time_BF11 = actions_BTA[:, None], time_BF[..., None, None]
    noisy_BFTA = (1 - time_BF11) * noise_BFTA + time_BF11 * actions_B1TA
    timesteps_R = (time_BF.flatten() * head.num_timestep_buckets).long()
    embodiments_R = inputs["embodiment_id"].repeat_interleave(num_flow)
    state_R1E = state_B1E.repeat_interleave(num_flow, dim=0)
    sequence_RKE = embed_actions(head, state_R1E, noisy_BFTA.flatten(0, 1), timesteps_R, embodiments_R)
    keys_values = context_keys_values(head.model, context_NW)
    velocity_RTA = predict_velocity(head, sequence_RKE, keys_values, timesteps_R, embodiments_R, attention)
    return F.mse_loss(velocity_RTA.view_as(noise_BFTA), actions_B1TA - noise_BFTA, reduction="none")


def reduce_masked(
    losses_BFTA: Tensor, mask_BTA: Tensor, reduction: str, reduce_count: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Sum over the elements of the mask by their number, as upstream; ``none`` does so sample by sample.

    ``reduce_count`` gives the mean count over ranks, and DDP averages the gradients, so the ranks together get total
    sum / total count.
    """
    weights_BFTA = mask_BTA.to(torch.float32)[:, None].expand_as(losses_BFTA)
    weighted_BFTA = losses_BFTA * weights_BFTA
    if reduction == "none":
        return weighted_BFTA.sum(dim=(1, 2, 3)) / weights_BFTA.sum(dim=(1, 2, 3)).clamp(min=1)
    count = weights_BFTA.sum()
    if reduce_count is not None:
        count = reduce_count(count)
    return weighted_BFTA.sum() / count.clamp(min=torch.finfo(torch.float32).tiny)


@torch.no_grad()
def sample_actions(
    head: Any,
    features_NW: Tensor,
    positions_N: Tensor,
    inputs: Any,
    attention: TokenAttention,
    noise_BTA: Tensor | None = None,
    observe: DenoisingObserver | None = None,
) -> Tensor:
    """``[B, T, A]`` actions (upstream: ``FlowmatchingActionHead.get_action``).

    Args:
        inputs: the prepared batch: ``state`` and ``embodiment_id``.
        noise_BTA: where denoising starts; drawn as upstream draws it when not given.
        observe: called with the state after every step.
    """
    context_NW = encode_context(head, features_NW, positions_N, attention)
    embodiments_B = inputs["embodiment_id"]
    state_B1E = head.state_encoder(inputs["state"], embodiments_B)
    batch_size, device = state_B1E.shape[0], context_NW.device
    if noise_BTA is None:
        size = (batch_size, head.config.action_horizon, head.config.action_dim)
        noise_BTA = torch.randn(size=size, dtype=context_NW.dtype, device=device)
    actions_BTA = noise_BTA
    keys_values = context_keys_values(head.model, context_NW)
    num_steps = head.num_inference_timesteps
    for step in range(num_steps):
        timestep = int(step / float(num_steps) * head.num_timestep_buckets)
        timesteps_B = torch.full(size=(batch_size,), fill_value=timestep, device=device)
        sequence_BKE = embed_actions(head, state_B1E, actions_BTA, timesteps_B, embodiments_B)
        velocity_BTA = predict_velocity(head, sequence_BKE, keys_values, timesteps_B, embodiments_B, attention)
        actions_BTA = actions_BTA + 1.0 / num_steps * velocity_BTA
        if observe is not None:
            observe(step, actions_BTA)
    return actions_BTA
