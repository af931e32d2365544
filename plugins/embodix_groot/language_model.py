# SPDX-License-Identifier: Apache-2.0
"""The language model (Qwen3, causal) on packed rows: no vocabulary logits, no cache, no kept hidden states.

Source: transformers/models/qwen3/modeling_qwen3.py. Positions count the valid tokens of each sample from 0, which is
what upstream has for one sample without padding.

Shape suffixes: N computed rows, W width, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from embodix.policies.functional import GatedSilu, RmsNorm, Rotate, is_untouched
from embodix_groot.attention import TokenAttention

Rope = tuple[Tensor, Tensor]


def language_features(model: Any, rows_NW: Tensor, positions_N: Tensor, attention: TokenAttention) -> Tensor:
    """``[N, W]`` normed output of the last layer: upstream's ``hidden_states[select_layer]``.

    Upstream cuts the model to ``select_layer`` layers, and transformers puts the final norm's output in the place of
    the last hidden state.
    """
    rope = rope_tables(model, rows_NW, positions_N)
    for layer in model.layers:
        rows_NW = language_layer(layer, rows_NW, rope, attention)
    return rms_norm(model.norm, rows_NW)


def rope_tables(model: Any, rows_NW: Tensor, positions_N: Tensor) -> Rope:
    """cos and sin of upstream's rotary module for packed rows, ``[N, D]``."""
    cos_1ND, sin_1ND = model.rotary_emb(rows_NW, positions_N[None])
    return cos_1ND[0], sin_1ND[0]


def language_layer(layer: Any, rows_NW: Tensor, rope: Rope, attention: TokenAttention) -> Tensor:
    """One decoder layer of all samples."""
    projections = layer.self_attn
    normed_NW = rms_norm(layer.input_layernorm, rows_NW)
    q_NHD = _heads(projections.q_proj(normed_NW), projections.head_dim)
    k_NGD = _heads(projections.k_proj(normed_NW), projections.head_dim)
    v_NGD = _heads(projections.v_proj(normed_NW), projections.head_dim)
    q_NHD = Rotate.apply(rms_norm(projections.q_norm, q_NHD), *rope)
    k_NGD = Rotate.apply(rms_norm(projections.k_norm, k_NGD), *rope)
    out_NHD = attention.among_tokens(q_NHD, k_NGD, v_NGD, causal=True)
    hidden_NW = rows_NW + projections.o_proj(out_NHD.flatten(1))
    return hidden_NW + gated_mlp(layer.mlp, rms_norm(layer.post_attention_layernorm, hidden_NW))


def rms_norm(norm: nn.Module, rows: Tensor) -> Tensor:
    """Upstream's RMSNorm; a module that is not exactly upstream's is called as it is."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    if is_untouched(norm, Qwen3RMSNorm):
        return RmsNorm.apply(rows, norm.weight, norm.variance_epsilon)
    return norm(rows)


def gated_mlp(mlp: nn.Module, rows_NW: Tensor) -> Tensor:
    """Upstream's gated MLP. Its Linears are always called as modules, since they may be quantised or adapted."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    if is_untouched(mlp, Qwen3MLP) and mlp.config.hidden_act == "silu":
        return mlp.down_proj(GatedSilu.apply(mlp.gate_proj(rows_NW), mlp.up_proj(rows_NW)))
    return mlp(rows_NW)


def _heads(rows: Tensor, head_dim: int) -> Tensor:
    return rows.unflatten(-1, (-1, head_dim))
