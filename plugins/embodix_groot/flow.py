# SPDX-License-Identifier: Apache-2.0
"""GR00T-N1.5 of LeRobot as a flow, on the packed path.

GR00T's time runs from noise (0) to action (1) and its velocity is action minus noise: both are turned round here. It
computes under its own autocast, and its dropout is off in rollout and in training.

Shape suffixes: B observations, F stochastic steps of each, R = B * F, T action steps, A padded action dimensions, L
prompt tokens (left-padded), I images, J images of the sample with the most, N computed rows, W a width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embodix.policies.flow_host import Batch, FlowSizes, RecomputedSteps, mean_over_tokens
from embodix.policies.settings import FastPathSettings
from embodix_groot.action_head import (
    action_features,
    context_keys_values,
    embed_actions,
    encode_context,
)
from embodix_groot.fast_path import EncodedObservation, GrootFastPath
from embodix_groot.reference import dropout_off

IDS_KEY, MASK_KEY, PIXELS_KEY = "eagle_input_ids", "eagle_attention_mask", "eagle_pixel_values"
PACKED_KEYS = (IDS_KEY, MASK_KEY, "state", "embodiment_id")


class GrootFlow:
    """A ``GrootPolicy`` with the settings of its fast path, which need not be installed."""

    def __init__(self, policy: Any, settings: FastPathSettings) -> None:
        self._policy = policy
        self._fast_path = GrootFastPath(policy, settings)
        self._head = head = policy._groot_model.action_head
        self.sizes = FlowSizes(
            num_denoising=int(head.num_inference_timesteps),
            num_predicted=int(head.config.action_horizon),
            num_executed=min(int(policy.config.n_action_steps), int(head.config.action_horizon)),
            padded_dims=int(head.config.action_dim),
            action_dims=int(policy.config.output_features["action"].shape[0]),
            prefix_width=int(head.config.backbone_embedding_dim) + int(head.input_embedding_dim),
            action_width=int(head.model.proj_out_2.out_features),
        )

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self._policy.parameters()).device
        return device

    def batch_size(self, batch: Batch) -> int:
        return int(batch[IDS_KEY].shape[0])

    def observe(self, batch: Batch) -> ObservedGroot:
        """The flow for observations; the policy is put into evaluation mode, as its own sampler does.

        Raises:
            ValueError: a key that is missing or not understood, or image tokens that do not match the images.
        """
        self._policy.eval()
        with torch.no_grad(), self._fast_path.autocast():
            return ObservedGroot(self._fast_path, self._fast_path.encode(batch, 1))

    def recompute(self, batch: Batch, x_BFTA: Tensor, step_BF: Tensor) -> RecomputedSteps:
        """Velocities of noisy actions with gradients."""
        num_flow = step_BF.shape[1]
        with dropout_off(self._policy), self._fast_path.autocast():
            observed = ObservedGroot(self._fast_path, self._fast_path.encode(batch, num_flow), num_flow)
            velocity_RTA, features_RW = observed.compute(x_BFTA.flatten(0, 1), step_BF.flatten())
            return RecomputedSteps(
                velocity_BFTA=velocity_RTA.view_as(x_BFTA),
                action_features_BFW=features_RW.unflatten(0, step_BF.shape),
                prefix_features_BW=observed.prefix_features(),
            )

    def pack_observation(self, batch: Batch) -> dict[str, Tensor]:
        """Prompt, state, embodiment, and the images of each sample, ``[B, J, 3, H, W]`` with blank ones at the end."""
        counts = self._num_images(batch[IDS_KEY], batch[MASK_KEY])
        parts = batch[PIXELS_KEY].split(counts)
        most = max(counts)
        pixels = torch.stack([F.pad(part, (0, 0) * 3 + (0, most - part.shape[0])) for part in parts])
        return {**{key: batch[key] for key in PACKED_KEYS}, PIXELS_KEY: pixels}

    def unpack_observation(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The batch with its images one after the other, blank ones left out."""
        counts = self._num_images(inputs[IDS_KEY], inputs[MASK_KEY])
        images = [sample[:count] for sample, count in zip(inputs[PIXELS_KEY], counts, strict=True)]
        return {**inputs, PIXELS_KEY: torch.cat(images)}

    def concatenate(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Several rollouts as one; prompts and images are padded to the longest."""
        prompt, images = (max(part[key].shape[1] for part in parts) for key in (IDS_KEY, PIXELS_KEY))
        padded = [self.pad(part, prompt, images) for part in parts]
        return {key: torch.cat([part[key] for part in padded]) for key in parts[0]}

    def pad(self, inputs: Mapping[str, Tensor], prompt_length: int, num_images: int) -> dict[str, Tensor]:
        """The same inputs with prompts padded on the left and images at the end, for a framework that joins them.

        Raises:
            ValueError: there are more tokens or images.
        """
        sizes = {IDS_KEY: prompt_length, MASK_KEY: prompt_length, PIXELS_KEY: num_images}
        longer = [key for key, size in sizes.items() if inputs[key].shape[1] > size]
        if longer:
            raise ValueError(
                f"Inputs are padded to {prompt_length} tokens and {num_images} images a sample; got "
                f"{inputs[IDS_KEY].shape[1]} and {inputs[PIXELS_KEY].shape[1]}. Raise the sizes."
            )
        padded = {key: _padded(inputs[key], size, at_start=key != PIXELS_KEY) for key, size in sizes.items()}
        return {**inputs, **padded}

    def _num_images(self, ids_BL: Tensor, mask_BL: Tensor) -> list[int]:
        eagle = self._policy._groot_model.backbone.eagle_model
        tokens_B = ((ids_BL == eagle.image_token_index) & mask_BL.bool()).sum(dim=1)
        counts: list[int] = (tokens_B // eagle.num_image_token).tolist()
        return counts


class ObservedGroot:
    """The velocity field for one batch of observations, ``num_flow`` sequences of each."""

    def __init__(self, fast_path: GrootFastPath, encoded: EncodedObservation, num_flow: int = 1) -> None:
        self._fast_path, self._encoded = fast_path, encoded
        self._head = head = fast_path.policy._groot_model.action_head
        layout, inputs = encoded.plan.layout, encoded.inputs
        context_NW = encode_context(head, encoded.features_NW, layout.positions_N, encoded.attention)
        state_B1E = head.state_encoder(inputs["state"], inputs["embodiment_id"])
        self._keys_values = context_keys_values(head.model, context_NW)
        self._prefix_BW = torch.cat([mean_over_tokens(context_NW, layout), state_B1E.float().mean(dim=1)], dim=1)
        self._state_R1E = state_B1E.repeat_interleave(num_flow, dim=0)
        self._embodiments_R = inputs["embodiment_id"].repeat_interleave(num_flow)
        self.noise_dtype = context_NW.dtype

    def initial_noise(self) -> Tensor:
        config = self._head.config
        size = (self._state_R1E.shape[0], config.action_horizon, config.action_dim)
        return torch.randn(size=size, dtype=self.noise_dtype, device=self._state_R1E.device)

    @torch.no_grad()
    def step(self, x_BTA: Tensor, step_B: Tensor) -> tuple[Tensor, Tensor]:
        with self._fast_path.autocast():
            return self.compute(x_BTA, step_B)

    def compute(self, x_RTA: Tensor, step_R: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity ``[R, T, A]`` and action features ``[R, W]``, with gradients where they are on."""
        head = self._head
        timesteps_R = step_timesteps(head, step_R)
        sequence_RKE = embed_actions(head, self._state_R1E, x_RTA, timesteps_R, self._embodiments_R)
        attention = self._encoded.attention
        features_RTW = action_features(head, sequence_RKE, self._keys_values, timesteps_R, attention)
        velocity_RTA = head.action_decoder(features_RTW, self._embodiments_R)
        return -velocity_RTA, features_RTW.float().mean(dim=1)

    def prefix_features(self) -> Tensor:
        """``[B, W]``: the mean over the context's tokens, and the encoded state."""
        return self._prefix_BW


def step_timesteps(head: Any, step_R: Tensor) -> Tensor:
    """``[R]`` int64 timesteps of denoising steps, rounded as upstream's sampler rounds them."""
    num_steps = int(head.num_inference_timesteps)
    timesteps = [int(step / float(num_steps) * head.num_timestep_buckets) for step in range(num_steps)]
    return torch.tensor(timesteps, device=step_R.device)[step_R]


def _padded(tensor: Tensor, size: int, *, at_start: bool) -> Tensor:
    """Zeros in the second dimension up to ``size``."""
    missing = size - tensor.shape[1]
    blank = tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:])
    return torch.cat([blank, tensor] if at_start else [tensor, blank], dim=1)
