# SPDX-License-Identifier: Apache-2.0
"""Action sampling of π0.5: the prefix's keys and values once, from valid tokens, then suffix-only denoising steps.

Shape suffixes: B samples, T action tokens, A padded action dimensions, N computed prefix rows, W width
of the language model, E width of the action expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodix.policies.settings import DenoisingObserver, FastPathSettings
from embodix_pi05.layers import (
    StepContext,
    computes_in_bfloat16,
    expert_layers,
    language_layers,
    last_prefix_kv,
    prefix_layer,
    step_context,
    suffix_layer,
)
from embodix_pi05.prefix import PrefixPlan, embed_prefix

PrefixCache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class EncodedPrefix:
    """Keys and values of every layer, and the rows that enter the last one."""

    keys_values: PrefixCache
    rows_NW: Tensor


class ActionSampler:
    """Denoises action chunks for one batch of observations (upstream: ``PI05Pytorch.sample_actions``)."""

    def __init__(self, policy: Any, plan: PrefixPlan, settings: FastPathSettings) -> None:
        self._policy, self._plan, self._settings = policy, plan, settings
        self._prefix: EncodedPrefix | None = None
        self._step: StepContext | None = None

    @torch.no_grad()
    def sample(
        self,
        noise_BTA: Tensor | None = None,
        num_steps: int | None = None,
        observe: DenoisingObserver | None = None,
        **rtc: Any,
    ) -> Tensor:
        """``[B, T, A]`` actions.

        Args:
            noise_BTA: where denoising starts; drawn as upstream draws it when not given.
            num_steps: denoising steps; the config's when not given.
            observe: called with the state after every step.
            rtc: upstream's real-time-chunking arguments.
        """
        model, config = self._policy.model, self._policy.config
        num_steps = config.num_inference_steps if num_steps is None else num_steps
        batch_size, device = self._plan.layout.batch_size, self._plan.sources_N.device
        if noise_BTA is None:
            shape = (batch_size, config.chunk_size, config.max_action_dim)
            noise_BTA = model.sample_noise(shape, device)
        dt = -1.0 / num_steps
        x_BTA = noise_BTA
        for index in range(num_steps):
            time = 1.0 + index * dt
            time_B = torch.tensor(time, dtype=torch.float32, device=device).expand(batch_size)
            v_BTA = self._velocity(x_BTA, time, time_B, rtc)
            x_BTA = x_BTA + dt * v_BTA
            if observe is not None:
                observe(index, x_BTA)
            if model.rtc_processor is not None and model.rtc_processor.is_debug_enabled():
                model.rtc_processor.track(time=time, x_t=x_BTA, v_t=v_BTA)
        return x_BTA

    def _velocity(self, x_BTA: Tensor, time: float, time_B: Tensor, rtc: dict[str, Any]) -> Tensor:
        """The denoising step, guided by upstream's real-time-chunking processor where that is enabled."""
        model = self._policy.model
        if not model._rtc_enabled():
            return self.denoise(x_BTA, time_B)
        return model.rtc_processor.denoise_step(
            x_t=x_BTA,
            prev_chunk_left_over=rtc.get("prev_chunk_left_over"),
            inference_delay=rtc.get("inference_delay"),
            time=time,
            original_denoise_step_partial=lambda x_t: self.denoise(x_t, time_B),
            execution_horizon=rtc.get("execution_horizon"),
        )

    @torch.no_grad()
    def denoise(self, x_BTA: Tensor, time_B: Tensor) -> Tensor:
        """``[B, T, A]`` velocity at ``time_B``; the prefix is computed at the first call."""
        return self._policy.model.action_out_proj(self.action_features(x_BTA, time_B))

    @torch.no_grad()
    def action_features(self, x_BTA: Tensor, time_B: Tensor) -> Tensor:
        """``[B, T, E]`` normed output of the action expert at ``time_B``, in fp32."""
        model = self._policy.model
        suffix_BTE, _, _, condition_BE = model.embed_suffix(x_BTA, time_B)
        if computes_in_bfloat16(self._policy):
            suffix_BTE = suffix_BTE.to(torch.bfloat16)
        if self._step is None or self._prefix is None:
            self._step = step_context(self._policy, self._plan, suffix_BTE, condition_BE, self._settings)
            self._prefix = encode_prefix(self._policy, self._plan, self._step)
        shared = self._step
        step = StepContext(shared.prefix_rope, shared.suffix_rope, shared.attention, condition_BE)
        for expert, prefix_kv in zip(expert_layers(self._policy), self._prefix.keys_values, strict=True):
            suffix_BTE = suffix_layer(expert, suffix_BTE, prefix_kv, step)
        norm = model.paligemma_with_expert.gemma_expert.model.norm
        normed_BTE, _ = norm(suffix_BTE, cond=condition_BE)
        return normed_BTE.to(torch.float32)

    def prefix_rows(self) -> Tensor:
        """``[N, W]`` rows of the prefix that enter the last layer.

        Raises:
            ValueError: before the first denoising step, which computes the prefix.
        """
        if self._prefix is None:
            raise ValueError("The prefix is computed in the first denoising step: ask for its rows after that.")
        return self._prefix.rows_NW


def encode_prefix(policy: Any, plan: PrefixPlan, step: StepContext) -> EncodedPrefix:
    """Keys and values of the prefix in every layer; the last layer computes nothing else."""
    prefix_NW = embed_prefix(policy, plan)
    if computes_in_bfloat16(policy):
        prefix_NW = prefix_NW.to(torch.bfloat16)
    layers = list(language_layers(policy))
    cache: PrefixCache = []
    for layer in layers[:-1]:
        prefix_NW, prefix_kv = prefix_layer(layer, prefix_NW, step)
        cache.append(prefix_kv)
    cache.append(last_prefix_kv(layers[-1], prefix_NW, step))
    return EncodedPrefix(cache, prefix_NW)
