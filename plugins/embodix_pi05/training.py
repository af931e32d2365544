# SPDX-License-Identifier: Apache-2.0
"""Training forward of π0.5 on a packed batch.

Shape suffixes: B samples, F flow samples an observation, R = B * F suffix sequences, T action tokens, A padded action
dimensions, N computed prefix rows, W width of the language model, E width of the action expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embodix.policies.settings import FastPathSettings
from embodix_pi05.layers import (
    StepContext,
    expert_layers,
    joint_layer,
    language_layers,
    last_layer,
    rope_tables,
    suffix_positions,
)
from embodix_pi05.prefix import PrefixPlan, embed_prefix
from embodix_pi05.prefix_lm import DensePrefixLm, VarlenPrefixLm


def draw_noise_and_time(model: Any, actions_BTA: Tensor, num_flow: int) -> tuple[Tensor, Tensor]:
    """``[B, F, T, A]`` noise and ``[B, F]`` time from upstream's samplers, noise first as upstream draws them."""
    draws = [
        (
            model.sample_noise(actions_BTA.shape, actions_BTA.device),
            model.sample_time(actions_BTA.shape[0], actions_BTA.device),
        )
        for _ in range(num_flow)
    ]
    noise, time = zip(*draws, strict=True)
    return torch.stack(noise, dim=1), torch.stack(time, dim=1)


def flow_matching_losses(
    policy: Any,
    plan: PrefixPlan,
    actions_BTA: Tensor,
    noise_BFTA: Tensor,
    time_BF: Tensor,
    settings: FastPathSettings,
) -> Tensor:
    """``[B, F, T, A]`` squared error of the velocity field (upstream: ``PI05Pytorch.forward``)."""
    time_BF11 = time_BF[..., None, None]
    actions_B1TA = actions_BTA[:, None]
    noisy_BFTA = time_BF11 * noise_BFTA + (1 - time_BF11) * actions_B1TA
    velocity_RTA = predict_velocity(policy, plan, noisy_BFTA.flatten(0, 1), time_BF.flatten(), settings)
    return F.mse_loss(noise_BFTA - actions_B1TA, velocity_RTA.view_as(noise_BFTA), reduction="none")


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
    model, num_sequences = policy.model, noisy_RTA.shape[0]
    num_blank = plan.layout.num_blank_samples * (num_sequences // plan.layout.batch_size)
    noisy_RTA, time_R = F.pad(noisy_RTA, (0, 0, 0, 0, 0, num_blank)), F.pad(time_R, (0, num_blank))
    prefix_NW = embed_prefix(policy, plan)
    suffix_RTE, _, _, condition_RE = model.embed_suffix(noisy_RTA, time_R)
    if computes_in_bfloat16(policy):
        prefix_NW, suffix_RTE = prefix_NW.to(torch.bfloat16), suffix_RTE.to(torch.bfloat16)
    step = step_context(policy, plan, suffix_RTE, condition_RE, settings)
    prefix_NW, suffix_RTE = _run_layers(policy, prefix_NW, suffix_RTE, step)
    normed_RTE, _ = model.paligemma_with_expert.gemma_expert.model.norm(suffix_RTE, cond=condition_RE)
    return JointPass(prefix_NW, normed_RTE)


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


def _run_layers(policy: Any, prefix_NW: Tensor, suffix_RTE: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
    """The prefix's rows that enter the last layer, and the suffix's that leave it."""
    pairs = list(zip(language_layers(policy), expert_layers(policy), strict=True))
    checkpointed = policy.model.gradient_checkpointing_enabled and policy.model.training

    def run(function: Any, *arguments: Any) -> Any:
        if checkpointed:
            return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
        return function(*arguments)

    for language, expert in pairs[:-1]:
        prefix_NW, suffix_RTE = run(joint_layer, language, expert, prefix_NW, suffix_RTE, step)
    return prefix_NW, run(last_layer, *pairs[-1], prefix_NW, suffix_RTE, step)
