# SPDX-License-Identifier: Apache-2.0
"""Run upstream's π0.5 and a fast path on the same batch and random stream, and keep what is compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodix.policies.settings import FastPathSettings
from embodix.testing.errors import gradients_of
from embodix_pi05.testing import masked_by_camera_pad, upstream_losses
from embodix_pi05.wrapper import Pi05Wrapper


@dataclass(frozen=True)
class TrainingRun:
    """Loss, gradients by parameter name, and the state of the random generator afterwards."""

    loss: float
    gradients: dict[str, Tensor | None]
    random_state: Tensor


def run_upstream(policy: Any, batch: Mapping[str, Tensor], seed: int = 0) -> TrainingRun:
    """Forward and backward of upstream's own model, ``camera_is_pad`` honoured in its image masks."""
    action_dim = policy.config.output_features["action"].shape[0]
    torch.manual_seed(seed)
    return finish_run(policy, upstream_losses(policy, batch)[..., :action_dim].mean())


def run_fast(policy: Any, batch: Mapping[str, Tensor], settings: FastPathSettings, seed: int = 0) -> TrainingRun:
    """Forward and backward with the fast path installed."""
    installation = Pi05Wrapper().install(policy, settings)
    try:
        torch.manual_seed(seed)
        loss, _ = policy(batch)
        return finish_run(policy, loss)
    finally:
        installation.uninstall()


def finish_run(policy: Any, loss: Tensor) -> TrainingRun:
    """Backward; the gradients are copied and cleared."""
    policy.zero_grad(set_to_none=True)
    loss.backward()
    run = TrainingRun(loss.item(), gradients_of(policy), torch.get_rng_state())
    policy.zero_grad(set_to_none=True)
    return run


def upstream_actions(policy: Any, batch: Mapping[str, Tensor], seed: int = 0, **kwargs: Any) -> Tensor:
    """``[B, T, A]`` actions of upstream's own sampler, ``camera_is_pad`` honoured in its image masks."""
    policy.eval()
    images, masks = policy._preprocess_images(batch)
    torch.manual_seed(seed)
    actions = policy.model.sample_actions(
        images,
        masked_by_camera_pad(batch, masks),
        batch["observation.language.tokens"],
        batch["observation.language.attention_mask"],
        **kwargs,
    )
    policy.train()
    return actions[..., : policy.config.output_features["action"].shape[0]]


def fast_actions(
    policy: Any, batch: Mapping[str, Tensor], settings: FastPathSettings, seed: int = 0, **kwargs: Any
) -> Tensor:
    """``[B, T, A]`` actions with the fast path installed."""
    installation = Pi05Wrapper().install(policy, settings)
    try:
        torch.manual_seed(seed)
        actions: Tensor = policy.predict_action_chunk(batch, **kwargs)
    finally:
        installation.uninstall()
        policy.train()
    return actions
