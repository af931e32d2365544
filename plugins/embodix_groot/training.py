# SPDX-License-Identifier: Apache-2.0
"""Flow matching of GR00T's action head (upstream: ``FlowmatchingActionHead.forward``) and its loss.

Shape suffixes: B samples, F flow samples an observation, R = B * F action sequences, N computed rows, W width of the
features, T action steps, A padded action dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embodix_groot.action_head import context_keys_values, embed_actions, encode_context, predict_velocity
from embodix_groot.attention import TokenAttention


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
