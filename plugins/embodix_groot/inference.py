# SPDX-License-Identifier: Apache-2.0
"""Action sampling of GR00T: features, context and its keys and values once, then the denoising steps.

Shape suffixes: B samples, N computed rows, W width of the features, T action steps, A padded action dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodix.policies.settings import DenoisingObserver
from embodix_groot.action_head import context_keys_values, embed_actions, encode_context, predict_velocity
from embodix_groot.attention import TokenAttention


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
