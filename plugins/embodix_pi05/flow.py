# SPDX-License-Identifier: Apache-2.0
"""π0.5 of LeRobot as a flow, on the packed path.

A rollout computes the prefix once and denoises with its keys and values. Training computes prefix and actions in one
joint pass: upstream's ``denoise_step`` deep-copies its cache, which autograd refuses, and the packed cache is made
without gradients.

Shape suffixes: B observations, F stochastic steps of each, R = B * F, T action steps, A padded action dimensions, E
width of the action expert, N computed prefix rows, W width of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from embodix.data.preprocessing import CAMERA_PAD_KEY
from embodix.policies.flow_host import Batch, FlowSizes, RecomputedSteps, mean_over_tokens
from embodix.policies.settings import FastPathSettings
from embodix_pi05.fast_path import TOKEN_MASK_KEY, TOKENS_KEY, Pi05FastPath
from embodix_pi05.inference import ActionSampler
from embodix_pi05.layers import joint_pass, language_layers, prefix_norm, project_velocity
from embodix_pi05.prefix import PrefixPlan


class Pi05Flow:
    """A ``PI05Policy`` with the settings of its fast path, which need not be installed."""

    def __init__(self, policy: Any, settings: FastPathSettings) -> None:
        self._policy, self._settings = policy, settings
        self._fast_path = Pi05FastPath(policy, settings)
        config, with_expert = policy.config, policy.model.paligemma_with_expert
        self.sizes = FlowSizes(
            num_denoising=config.num_inference_steps,
            num_predicted=config.chunk_size,
            num_executed=config.n_action_steps,
            padded_dims=config.max_action_dim,
            action_dims=int(config.output_features["action"].shape[0]),
            prefix_width=int(with_expert.paligemma.config.text_config.hidden_size),
            action_width=int(policy.model.action_out_proj.in_features),
        )

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self._policy.parameters()).device
        return device

    def batch_size(self, batch: Batch) -> int:
        return int(batch[TOKENS_KEY].shape[0])

    def observe(self, batch: Batch) -> ObservedPi05:
        """The flow for observations; the policy is put into evaluation mode, as its own sampler does.

        Raises:
            ValueError: cameras that do not match, or no prompt.
        """
        self._policy.eval()
        return ObservedPi05(self._policy, self._fast_path.prefix_plan(batch), self._settings)

    def recompute(self, batch: Batch, x_BFTA: Tensor, step_BF: Tensor) -> RecomputedSteps:
        """Velocities of noisy actions with gradients, prefix included."""
        plan = self._fast_path.prefix_plan(batch)
        time_R = step_times(step_BF.flatten(), self.sizes.num_denoising)
        passed = joint_pass(self._policy, plan, x_BFTA.flatten(0, 1), time_R, self._settings)
        suffix_RTE = passed.suffix_RTE.to(torch.float32)
        return RecomputedSteps(
            velocity_BFTA=project_velocity(self._policy, suffix_RTE).view_as(x_BFTA),
            action_features_BFW=suffix_RTE.mean(dim=1).unflatten(0, step_BF.shape),
            prefix_features_BW=prefix_features(self._policy, passed.prefix_NW, plan),
        )

    def pack_observation(self, batch: Batch) -> dict[str, Tensor]:
        """Images of the cameras that are there, prompt, and what is known of absent cameras."""
        cameras = [key for key in self._policy.config.image_features if key in batch]
        known = [key for key in (CAMERA_PAD_KEY,) if key in batch]
        return {key: batch[key] for key in (*cameras, TOKENS_KEY, TOKEN_MASK_KEY, *known)}

    def unpack_observation(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(inputs)

    def concatenate(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Several rollouts as one; all have the prompt's padded length."""
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    def pad(self, inputs: Mapping[str, Tensor], prompt_length: int, num_images: int) -> dict[str, Tensor]:
        """The same inputs: upstream pads every prompt alike, and each camera has a key of its own."""
        return dict(inputs)


class ObservedPi05:
    """The velocity field for one batch of observations."""

    noise_dtype = torch.float32

    def __init__(self, policy: Any, plan: PrefixPlan, settings: FastPathSettings) -> None:
        self._policy, self._plan = policy, plan
        self._sampler = ActionSampler(policy, plan, settings)

    def initial_noise(self) -> Tensor:
        config, plan = self._policy.config, self._plan
        shape = (plan.layout.batch_size, config.chunk_size, config.max_action_dim)
        noise_BTA: Tensor = self._policy.model.sample_noise(shape, plan.sources_N.device)
        return noise_BTA

    def step(self, x_BTA: Tensor, step_B: Tensor) -> tuple[Tensor, Tensor]:
        time_B = step_times(step_B, self._policy.config.num_inference_steps)
        features_BTE = self._sampler.action_features(x_BTA, time_B)
        return project_velocity(self._policy, features_BTE), features_BTE.mean(dim=1)

    def prefix_features(self) -> Tensor:
        return prefix_features(self._policy, self._sampler.prefix_rows(), self._plan)


def step_times(step_R: Tensor, num_steps: int) -> Tensor:
    """``[R]`` times of denoising steps, rounded as upstream's sampler rounds them."""
    dt = -1.0 / num_steps
    times = [1.0 + index * dt for index in range(num_steps)]
    return torch.tensor(times, dtype=torch.float32, device=step_R.device)[step_R]


def prefix_features(policy: Any, rows_NW: Tensor, plan: PrefixPlan) -> Tensor:
    """``[B, W]`` what the last language layer reads, averaged over the tokens of each sample.

    π-RL reads the output of the last layer; nothing else needs it, so it is not computed.
    """
    last: Any = language_layers(policy)[-1]
    normed_NW = prefix_norm(last.input_layernorm, rows_NW)
    return mean_over_tokens(normed_NW, plan.layout)
