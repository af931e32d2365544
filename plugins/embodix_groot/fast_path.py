# SPDX-License-Identifier: Apache-2.0
"""The methods that replace upstream's on one ``GrootPolicy`` instance.

Shape suffixes: B samples, L prompt tokens (padded), F flow samples an observation, T action steps, A padded action
dimensions, I images, N computed rows, W width of the features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodix.policies.functional import fill_padded_actions
from embodix.policies.installation import require_key
from embodix.policies.settings import DenoisingObserver, FastPathSettings, TokenCounts
from embodix_groot.action_head import (
    draw_noise_and_time,
    flow_matching_losses,
    num_action_tokens,
    reduce_masked,
    sample_actions,
)
from embodix_groot.attention import DenseTokens, TokenAttention, VarlenTokens
from embodix_groot.backbone import TokenPlan, backbone_features, plan_tokens

ACTION_PAD_KEY = "action_is_pad"
EAGLE_PREFIX = "eagle_"
EAGLE_KEYS = ("eagle_input_ids", "eagle_attention_mask", "eagle_pixel_values")
UNUSED_EAGLE_KEYS = ("eagle_image_sizes",)
OBSERVATION_KEYS = ("state", "embodiment_id")


@dataclass(frozen=True)
class EncodedObservation:
    """A batch of observations after the backbone.

    Attributes:
        inputs: prepared, on the device.
        plan, attention: of its tokens.
        features_NW: of the computed rows.
    """

    inputs: Any
    plan: TokenPlan
    attention: TokenAttention
    features_NW: Tensor


class GrootFastPath:
    """Training forward and action sampling on a packed batch, with upstream's signatures."""

    def __init__(self, policy: Any, settings: FastPathSettings) -> None:
        self.policy = policy
        self.settings = settings
        self.token_counts: TokenCounts | None = None

    def forward(self, batch: dict[str, Any], reduction: str = "mean") -> tuple[Tensor, dict[str, Any]]:
        """Loss of a training batch (upstream: ``GrootPolicy.forward``).

        Args:
            reduction: ``mean`` for a scalar, ``none`` for one loss a sample.

        Raises:
            ValueError: a key that is missing or not understood, image tokens that do not match the images, or no
                ``action_is_pad`` with ``action_pad=mask``.
        """
        mask_BTA = self._loss_mask(batch)
        if self.settings.action_pad == "mask":
            batch = {**batch, "action": fill_padded_actions(batch["action"], self._action_is_pad(batch))}
        losses_BFTA = self.losses(batch)
        mask_BTA = mask_BTA.to(losses_BFTA.device)
        loss = reduce_masked(losses_BFTA, mask_BTA, reduction, self.settings.reduce_count)
        return loss, {"loss": loss.detach().mean().item()}

    def action_elements(self, batch: Mapping[str, Any]) -> int:
        """Elements that the loss of this batch is a mean over, flow samples included."""
        return int(self._loss_mask(batch).sum()) * self.settings.flow_samples

    def losses(
        self, batch: Mapping[str, Any], noise_BFTA: Tensor | None = None, time_BF: Tensor | None = None
    ) -> Tensor:
        """Unreduced, unmasked losses ``[B, F, T, A]``.

        Noise and time are drawn, in upstream's order, unless both are given.
        """
        head = self.policy._groot_model.action_head

        def draw(actions_BTA: Tensor) -> tuple[Tensor, Tensor]:
            if noise_BFTA is None or time_BF is None:
                return draw_noise_and_time(head, actions_BTA, self.settings.flow_samples)
            return noise_BFTA, time_BF

        with self.autocast():
            inputs = self._prepared(batch, (*OBSERVATION_KEYS, "action"))
            plan = self._plan(batch, inputs["state"].device)
            num_queries = self.settings.flow_samples * num_action_tokens(head, inputs["state"].shape[1])
            self.token_counts = self._count(batch, plan, num_queries)
            attention = self._attention(plan, num_queries)
            features_NW = self._features(inputs, plan, attention)
            return flow_matching_losses(head, features_NW, plan.layout.positions_N, inputs, draw, attention)

    @torch.no_grad()
    def predict_action_chunk(
        self, batch: dict[str, Any], noise: Tensor | None = None, observe: DenoisingObserver | None = None
    ) -> Tensor:
        """``[B, T, action_dim]`` actions for observations (upstream: ``GrootPolicy.predict_action_chunk``)."""
        self.policy.eval()
        head = self.policy._groot_model.action_head
        with self.autocast():
            seen = self.encode(batch, 1)
            positions_N = seen.plan.layout.positions_N
            actions_BTA = sample_actions(
                head, seen.features_NW, positions_N, seen.inputs, seen.attention, noise, observe
            )
        return actions_BTA[..., : self.policy.config.output_features["action"].shape[0]]

    def encode(self, batch: Mapping[str, Any], num_flow: int) -> EncodedObservation:
        """The features of a batch of observations, for ``num_flow`` action sequences of each; call under `autocast`.

        Raises:
            ValueError: a key that is missing or not understood, or image tokens that do not match the images.
        """
        head = self.policy._groot_model.action_head
        inputs = self._prepared(batch, OBSERVATION_KEYS)
        plan = self._plan(batch, inputs["state"].device)
        attention = self._attention(plan, num_flow * num_action_tokens(head, inputs["state"].shape[1]))
        return EncodedObservation(inputs, plan, attention, self._features(inputs, plan, attention))

    def autocast(self) -> torch.autocast:
        """Upstream's own: on or off by ``use_bf16``, whatever autocast is around it."""
        device = next(self.policy.parameters()).device
        return torch.autocast(device_type=device.type, dtype=torch.bfloat16, enabled=self.policy.config.use_bf16)

    def _prepared(self, batch: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
        """The inputs on the device and in the dtype that upstream casts them to."""
        known = (*EAGLE_KEYS, *UNUSED_EAGLE_KEYS)
        unknown = [key for key in batch if key.startswith(EAGLE_PREFIX) and key not in known]
        if unknown:
            raise ValueError(
                f"The packed GR00T reads {', '.join(EAGLE_KEYS)}; got {', '.join(unknown)} too, which upstream would "
                "pass on to its backbone. Remove it, or set packing, attention and vision_tokens to upstream."
            )
        inputs = {key: require_key(batch, key, "GR00T") for key in (*EAGLE_KEYS, *keys)}
        _, prepared = self.policy._groot_model.prepare_input(inputs)
        return prepared

    def _plan(self, batch: Mapping[str, Any], device: torch.device) -> TokenPlan:
        image_token = self.policy._groot_model.backbone.eagle_model.image_token_index
        ids_BL, mask_BL = batch["eagle_input_ids"], batch["eagle_attention_mask"]
        return plan_tokens(ids_BL, mask_BL, image_token, self.settings.packer, device)

    def _attention(self, plan: TokenPlan, queries_a_sample: int) -> TokenAttention:
        device = plan.ids_N.device
        if self.settings.attention is None:
            return DenseTokens(plan.layout, device)
        return VarlenTokens(self.settings.attention, plan.layout, queries_a_sample, device)

    def _features(self, inputs: Any, plan: TokenPlan, attention: TokenAttention) -> Tensor:
        backbone = self.policy._groot_model.backbone
        return backbone_features(backbone, plan, inputs["eagle_pixel_values"], attention)

    def _loss_mask(self, batch: Mapping[str, Any]) -> Tensor:
        """``[B, T, A]``: upstream's mask, without padded steps where they are to be left out."""
        mask_BTA: Tensor = require_key(batch, "action_mask", "GR00T's loss")
        if self.settings.action_pad == "mask":
            return mask_BTA * ~self._action_is_pad(batch)[..., None]
        return mask_BTA

    def _action_is_pad(self, batch: Mapping[str, Any]) -> Tensor:
        """``[B, T]``: steps that do not exist, those that the processor appends to a short chunk included."""
        is_pad_BT = require_key(batch, ACTION_PAD_KEY, "action_pad=mask").to(torch.bool)
        num_steps = batch["action"].shape[1]
        return torch.nn.functional.pad(is_pad_BT, (0, num_steps - is_pad_BT.shape[1]), value=True)

    def _count(self, batch: Mapping[str, Any], plan: TokenPlan, queries_a_sample: int) -> TokenCounts:
        layout = plan.layout
        num_queries = layout.batch_size * queries_a_sample
        num_images = batch["eagle_pixel_values"].shape[0]
        num_steps = layout.batch_size * batch["action"].shape[1]
        is_pad = batch.get(ACTION_PAD_KEY)
        return TokenCounts(
            valid=layout.num_valid + num_queries,
            computed=layout.num_computed + num_queries,
            upstream=layout.batch_size * layout.padded_length + num_queries,
            images_computed=num_images,
            images_upstream=num_images,
            action_valid=num_steps if is_pad is None else num_steps - int(self._action_is_pad(batch).sum()),
            action_total=num_steps,
        )
