# SPDX-License-Identifier: Apache-2.0
"""The transformer of π0.5 on a packed prefix and a dense suffix: its layers, and one joint pass through all of them.

One layer runs the language model's block on the prefix and the action expert's block on the suffix, with one joint
attention between them (upstream: ``compute_layer_complete``). In the last layer only keys and values of the prefix
are needed: nothing reads its output.

Shape suffixes: N computed prefix rows, R suffix sequences (samples x flow samples), T action tokens, A padded action
dimensions, W width of the language model, E width of the action expert, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from embodix.policies.functional import GatedGelu, Rotate, gemma_rms_norm, is_untouched, with_zero_gradients
from embodix.policies.settings import FastPathSettings
from embodix.policies.units import call_unit
from embodix_pi05.attention import DensePrefixLm, PrefixLm, VarlenPrefixLm
from embodix_pi05.prefix import PrefixPlan, embed_prefix

Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class StepContext:
    """What all layers of one step share: RoPE tables of prefix and suffix rows, the attention, the time condition."""

    prefix_rope: Rope
    suffix_rope: Rope
    attention: PrefixLm
    condition_RE: Tensor


def rope_tables(rotary: nn.Module, like: Tensor, positions: Tensor) -> Rope:
    """cos and sin of upstream's rotary module for packed rows, ``[rows, D]``."""
    cos, sin = rotary(like, positions[None])
    return cos[0], sin[0]


def suffix_positions(lengths: tuple[int, ...], num_flow: int, num_actions: int, device: torch.device) -> Tensor:
    """Action tokens count on from their prefix, ``[R * T]``."""
    starts_R = torch.tensor(lengths, dtype=torch.int64).repeat_interleave(num_flow)
    return (starts_R[:, None] + torch.arange(num_actions)).flatten().to(device)


def language_layers(policy: Any) -> nn.ModuleList:
    return policy.model.paligemma_with_expert.paligemma.model.language_model.layers


def expert_layers(policy: Any) -> nn.ModuleList:
    return policy.model.paligemma_with_expert.gemma_expert.model.layers


def joint_layer(
    language: nn.Module, expert: nn.Module, prefix_NW: Tensor, suffix_RTE: Tensor, step: StepContext
) -> tuple[Tensor, Tensor]:
    """One layer of prefix and suffix."""
    q_NHD, prefix_kv = _prefix_heads(language, prefix_NW, step.prefix_rope)
    suffix_RTE = suffix_layer(expert, suffix_RTE, prefix_kv, step)
    return _prefix_output(language, prefix_NW, q_NHD, prefix_kv, step), suffix_RTE


def prefix_layer(language: nn.Module, prefix_NW: Tensor, step: StepContext) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One layer of the prefix alone: its output, and the keys and values that the suffix will read."""
    q_NHD, prefix_kv = _prefix_heads(language, prefix_NW, step.prefix_rope)
    return _prefix_output(language, prefix_NW, q_NHD, prefix_kv, step), prefix_kv


def last_layer(
    language: nn.Module, expert: nn.Module, prefix_NW: Tensor, suffix_RTE: Tensor, step: StepContext
) -> Tensor:
    """The last layer: of the prefix only keys and values.

    Upstream's query projection gets a gradient of exact zeros here (its optimizer still decays it), so ours does too.
    """
    prefix_kv = last_prefix_kv(language, prefix_NW, step)
    suffix_RTE = suffix_layer(expert, suffix_RTE, prefix_kv, step)
    return with_zero_gradients(suffix_RTE, *language.self_attn.q_proj.parameters())


def last_prefix_kv(language: nn.Module, prefix_NW: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
    """Keys and values of the last layer's prefix."""
    attention = language.self_attn
    normed_NW = prefix_norm(language.input_layernorm, prefix_NW)
    k_NGD = _heads(attention.k_proj(normed_NW), attention.head_dim)
    return rotate(k_NGD, step.prefix_rope), _heads(attention.v_proj(normed_NW), attention.head_dim)


def _prefix_heads(language: nn.Module, prefix_NW: Tensor, rope: Rope) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    attention = language.self_attn
    normed_NW = prefix_norm(language.input_layernorm, prefix_NW)
    q_NHD = _heads(attention.q_proj(normed_NW), attention.head_dim)
    k_NGD = _heads(attention.k_proj(normed_NW), attention.head_dim)
    v_NGD = _heads(attention.v_proj(normed_NW), attention.head_dim)
    return rotate(q_NHD, rope), (rotate(k_NGD, rope), v_NGD)


def _prefix_output(
    language: nn.Module, prefix_NW: Tensor, q_NHD: Tensor, prefix_kv: tuple[Tensor, Tensor], step: StepContext
) -> Tensor:
    attention = language.self_attn
    out_NHD = step.attention.prefix(q_NHD, *prefix_kv, attention.scaling)
    hidden_NW = prefix_NW + attention.o_proj(_cast_like(out_NHD.flatten(1), attention.o_proj))
    normed_NW = prefix_norm(language.post_attention_layernorm, hidden_NW)
    return hidden_NW + gated_mlp(language.mlp, _cast_for_mlp(normed_NW, language.mlp))


def suffix_layer(expert: nn.Module, suffix_RTE: Tensor, prefix_kv: tuple[Tensor, Tensor], step: StepContext) -> Tensor:
    """One layer of the action expert, reading the prefix's keys and values."""
    attention = expert.self_attn
    normed_RTE, gate = expert.input_layernorm(suffix_RTE, cond=step.condition_RE)
    rows_E = normed_RTE.flatten(0, 1)
    q_MHD = rotate(_heads(attention.q_proj(rows_E), attention.head_dim), step.suffix_rope)
    k_MGD = rotate(_heads(attention.k_proj(rows_E), attention.head_dim), step.suffix_rope)
    v_MGD = _heads(attention.v_proj(rows_E), attention.head_dim)
    out_MHD = step.attention.suffix(q_MHD, prefix_kv, (k_MGD, v_MGD), attention.scaling)
    out_RTE = attention.o_proj(_cast_like(out_MHD.flatten(1), attention.o_proj)).view_as(suffix_RTE)
    hidden_RTE = suffix_RTE + out_RTE * gate
    normed_RTE, gate = expert.post_attention_layernorm(hidden_RTE, cond=step.condition_RE)
    return hidden_RTE + gated_mlp(expert.mlp, _cast_for_mlp(normed_RTE, expert.mlp)) * gate


def prefix_norm(norm: nn.Module, rows_NW: Tensor) -> Tensor:
    """Upstream's unconditional RMSNorm; a module that is not exactly upstream's is called as it is."""
    from lerobot.policies.pi_gemma import PiGemmaRMSNorm

    if is_untouched(norm, PiGemmaRMSNorm) and norm.dense is None:
        return gemma_rms_norm(rows_NW, norm.weight, norm.eps)
    normed_NW, _ = norm(rows_NW)
    return normed_NW


def gated_mlp(mlp: nn.Module, rows: Tensor) -> Tensor:
    """Upstream's gated MLP. Its Linears are always called as modules, since they may be quantised or adapted."""
    from transformers.models.gemma.modeling_gemma import GemmaMLP

    if is_untouched(mlp, GemmaMLP) and mlp.config.hidden_activation == "gelu_pytorch_tanh":
        return mlp.down_proj(GatedGelu.apply(mlp.gate_proj(rows), mlp.up_proj(rows)))
    return mlp(rows)


def rotate(heads_NHD: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding of packed rows, as upstream's ``apply_rotary_pos_emb``."""
    return Rotate.apply(heads_NHD, *rope)


def _heads(rows: Tensor, head_dim: int) -> Tensor:
    return rows.unflatten(-1, (-1, head_dim))


def _cast_like(rows: Tensor, linear: nn.Module) -> Tensor:
    """Upstream casts the attention output to the dtype of the output projection."""
    return rows.to(linear.weight.dtype)


def _cast_for_mlp(rows: Tensor, mlp: nn.Module) -> Tensor:
    """Upstream casts to bfloat16 where the MLP is in bfloat16, and not otherwise."""
    return rows.to(torch.bfloat16) if mlp.up_proj.weight.dtype == torch.bfloat16 else rows


@dataclass(frozen=True)
class JointPass:
    """What the layers leave of one pass over prefix and suffix.

    Attributes:
        prefix_NW: the prefix's rows that enter the last layer, which computes nothing further of them.
        suffix_RTE: the action expert's normed output, that of blank samples included.
    """

    prefix_NW: Tensor
    suffix_RTE: Tensor


def predict_velocity(
    policy: Any, plan: PrefixPlan, noisy_RTA: Tensor, time_R: Tensor, settings: FastPathSettings
) -> Tensor:
    """``[R, T, A]`` velocity for noisy actions."""
    suffix_RTE = joint_pass(policy, plan, noisy_RTA, time_R, settings).suffix_RTE
    return project_velocity(policy, suffix_RTE)[: noisy_RTA.shape[0]]


def joint_pass(
    policy: Any, plan: PrefixPlan, noisy_RTA: Tensor, time_R: Tensor, settings: FastPathSettings
) -> JointPass:
    """All layers for noisy actions; the sequences of one sample follow each other."""
    prefix_NW, suffix_RTE, condition_RE = embed(policy, plan, noisy_RTA, time_R)
    step = step_context(policy, plan, suffix_RTE, condition_RE, settings)
    every_layer = range(len(language_layers(policy)))
    prefix_NW, suffix_RTE = run_layers(policy, every_layer, prefix_NW, suffix_RTE, step)
    return JointPass(prefix_NW, last_norm(policy, suffix_RTE, condition_RE))


def embed(policy: Any, plan: PrefixPlan, noisy_RTA: Tensor, time_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What enters the first layer: prefix ``[N, W]``, suffix ``[R, T, E]`` and time condition ``[R, E]``."""
    num_blank = plan.layout.num_blank_samples * (noisy_RTA.shape[0] // plan.layout.batch_size)
    noisy_RTA, time_R = F.pad(noisy_RTA, (0, 0, 0, 0, 0, num_blank)), F.pad(time_R, (0, num_blank))
    prefix_NW = embed_prefix(policy, plan)
    suffix_RTE, _, _, condition_RE = policy.model.embed_suffix(noisy_RTA, time_R)
    if computes_in_bfloat16(policy):
        prefix_NW, suffix_RTE = prefix_NW.to(torch.bfloat16), suffix_RTE.to(torch.bfloat16)
    return prefix_NW, suffix_RTE, condition_RE


def last_norm(policy: Any, suffix_RTE: Tensor, condition_RE: Tensor) -> Tensor:
    """``[R, T, E]`` output of the action expert."""
    normed_RTE: Tensor = policy.model.paligemma_with_expert.gemma_expert.model.norm(suffix_RTE, cond=condition_RE)[0]
    return normed_RTE


def project_velocity(policy: Any, suffix_RTE: Tensor) -> Tensor:
    """``[R, T, A]`` velocity of the action expert's normed output."""
    model = policy.model
    velocity_RTA: Tensor = model._apply_checkpoint(model.action_out_proj, suffix_RTE.to(torch.float32))
    return velocity_RTA


def computes_in_bfloat16(policy: Any) -> bool:
    """Upstream looks at the first query projection."""
    return bool(language_layers(policy)[0].self_attn.q_proj.weight.dtype == torch.bfloat16)


def step_context(
    policy: Any, plan: PrefixPlan, suffix_RTE: Tensor, condition_RE: Tensor, settings: FastPathSettings
) -> StepContext:
    """RoPE tables, attention boundaries and masks, once for all layers."""
    layout, device = plan.layout, suffix_RTE.device
    num_flow, num_actions = suffix_RTE.shape[0] // len(layout.computed_lengths), suffix_RTE.shape[1]
    rotary = policy.model.paligemma_with_expert.paligemma.model.language_model.rotary_emb
    attention: VarlenPrefixLm | DensePrefixLm
    if settings.attention is None:
        module = language_layers(policy)[0].self_attn
        attention = DensePrefixLm(layout, num_flow, num_actions, device, module)
    else:
        attention = VarlenPrefixLm(settings.attention, layout, num_flow, num_actions, device)
    positions = suffix_positions(layout.computed_lengths, num_flow, num_actions, device)
    return StepContext(
        prefix_rope=rope_tables(rotary, suffix_RTE, layout.positions_N),
        suffix_rope=rope_tables(rotary, suffix_RTE, positions),
        attention=attention,
        condition_RE=condition_RE,
    )


def run_layers(
    policy: Any, layers: range, prefix_NW: Tensor, suffix_RTE: Tensor, step: StepContext
) -> tuple[Tensor, Tensor]:
    """Some layers that follow each other: the prefix's rows that leave them, or enter the last of the policy, and the
    suffix's that leave them."""
    pairs = list(zip(language_layers(policy), expert_layers(policy), strict=True))
    checkpointed = policy.model.gradient_checkpointing_enabled and policy.model.training

    def run(function: Any, language: nn.Module, *arguments: Any) -> Any:
        if checkpointed:
            options = {"use_reentrant": False, "preserve_rng_state": False}
            return checkpoint(call_unit, language, function, *arguments, **options)
        return call_unit(language, function, *arguments)

    for index in layers:
        if index == len(pairs) - 1:
            suffix_RTE = run(last_layer, *pairs[index], prefix_NW, suffix_RTE, step)
        else:
            prefix_NW, suffix_RTE = run(joint_layer, *pairs[index], prefix_NW, suffix_RTE, step)
    return prefix_NW, suffix_RTE
