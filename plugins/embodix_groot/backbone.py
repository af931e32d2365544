# SPDX-License-Identifier: Apache-2.0
"""The vision-language backbone on packed rows (upstream: ``EagleBackbone.forward``), and which rows are computed.

The language model (Qwen3, causal; source: transformers/models/qwen3/modeling_qwen3.py) has no vocabulary logits, no
cache and no kept hidden states here. Positions count the valid tokens of each sample from 0, which is what upstream has
for one sample without padding. A part that is frozen keeps nothing for a backward pass: none of its inputs ask for a
gradient, so autograd records nothing, and what is computed here instead of upstream's modules records no more than they
do.

Shape suffixes: B samples, L prompt tokens (padded), I images, P patches an image, M = I * P image rows, N computed
rows, W width of the language model, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embodix.contracts import Packer
from embodix.packing.layout import PackedLayout
from embodix.policies.functional import GatedSilu, RmsNorm, Rotate, is_untouched, with_zero_gradients
from embodix.policies.units import call_unit
from embodix_groot.attention import TokenAttention


def backbone_features(backbone: Any, plan: TokenPlan, pixels_I3HW: Tensor, attention: TokenAttention) -> Tensor:
    """``[N, W]`` features of images and instruction.

    Raises:
        ValueError: the prompts have more or fewer image tokens than the images give.
    """
    backbone.set_frozen_modules_to_eval_mode()
    eagle = backbone.eagle_model
    images_MW = image_features(eagle, pixels_I3HW).flatten(0, 1)
    num_image_tokens = plan.image_rows_M.numel()
    if num_image_tokens != images_MW.shape[0]:
        raise ValueError(
            f"Every patch of an image needs one image token (id {eagle.image_token_index}) in a prompt; got "
            f"{num_image_tokens} image tokens for {pixels_I3HW.shape[0]} images of "
            f"{images_MW.shape[0] // max(1, pixels_I3HW.shape[0])} patches. Preprocess the batch with the policy's own "
            "processor."
        )
    rows_NW = eagle.language_model.get_input_embeddings()(plan.ids_N)
    rows_NW = rows_NW.index_copy(0, plan.image_rows_M, images_MW.to(rows_NW.dtype))
    features_NW = language_features(eagle.language_model.model, rows_NW, plan.layout.positions_N, attention)
    features_NW = backbone.eagle_linear(features_NW)
    if backbone.training and backbone.tune_visual:
        # Upstream adds 0 * (sum of all vision parameters), which gives those that nothing reads a zero gradient.
        return with_zero_gradients(features_NW, *_unread_vision_parameters(eagle))
    return features_NW


def image_features(eagle: Any, pixels_I3HW: Tensor) -> Tensor:
    """``[I, P, W]``: vision tower and connector, without the pooling head that nothing reads."""
    if not _has_plain_connector(eagle):
        features_IPW: Tensor = eagle.extract_feature(pixels_I3HW)
        return features_IPW
    tower = eagle.vision_model.vision_model
    hidden_IPC = tower.encoder(inputs_embeds=tower.embeddings(pixels_I3HW)).last_hidden_state
    return eagle.mlp1(tower.post_layernorm(hidden_IPC))


def _has_plain_connector(eagle: Any) -> bool:
    """The released model's choice; for any other upstream's own ``extract_feature`` is called."""
    return eagle.select_layer == -1 and not eagle.use_pixel_shuffle and not eagle.mlp_checkpoint


def _unread_vision_parameters(eagle: Any) -> list[Tensor]:
    """Parameters that ``image_features`` may not read: the pooling head, or any where upstream's code runs."""
    tower = eagle.vision_model.vision_model
    unread = getattr(tower, "head", None) if _has_plain_connector(eagle) else tower
    return [] if unread is None else list(unread.parameters())


Rope = tuple[Tensor, Tensor]


def language_features(model: Any, rows_NW: Tensor, positions_N: Tensor, attention: TokenAttention) -> Tensor:
    """``[N, W]`` normed output of the last layer: upstream's ``hidden_states[select_layer]``.

    Upstream cuts the model to ``select_layer`` layers, and transformers puts the final norm's output in the place of
    the last hidden state.
    """
    rope = rope_tables(model, rows_NW, positions_N)
    for layer in model.layers:
        rows_NW = call_unit(layer, language_layer, rows_NW, rope, attention)
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


@dataclass(frozen=True)
class TokenPlan:
    """What to embed and where. Tensors are on the model's device.

    Attributes:
        layout: the packer's decision.
        ids_N: language ids of the computed rows.
        image_rows_M: the computed rows that image patches go to, in the order of the images.
    """

    layout: PackedLayout
    ids_N: Tensor
    image_rows_M: Tensor


def plan_tokens(ids_BL: Tensor, mask_BL: Tensor, image_token: int, packer: Packer, device: torch.device) -> TokenPlan:
    """Decide on the host what is computed on ``device``; one transfer of the prompt, no other wait for the device."""
    host_ids_BL = ids_BL.detach().to("cpu")
    valid_BL = mask_BL.detach().to("cpu", torch.bool)
    layout = packer.layout(valid_BL)
    is_image_BL = (host_ids_BL == image_token) & valid_BL
    image_rows_M = is_image_BL.flatten()[layout.rows_N].nonzero().squeeze(1)
    on_device = layout.to(device)
    return TokenPlan(on_device, ids_BL.to(device).flatten()[on_device.rows_N], image_rows_M.to(device))
