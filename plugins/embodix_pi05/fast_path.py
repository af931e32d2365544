# SPDX-License-Identifier: Apache-2.0
"""The methods that replace upstream's on one ``PI05Policy`` instance.

Shape suffixes: B samples, F flow samples an observation, T action tokens, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embodix.policies.functional import fill_padded_actions, reduce_all, reduce_valid, valid_elements
from embodix.policies.installation import require_key
from embodix.policies.settings import FastPathSettings, TokenCounts
from embodix_pi05.inference import ActionSampler
from embodix_pi05.layers import predict_velocity
from embodix_pi05.prefix import CameraBatch, PrefixPlan, collect_cameras, patches_per_image, plan_prefix

ACTION_PAD_KEY, ACTION_DIMS_KEY = "action_is_pad", "action_dims"
TOKENS_KEY = "observation.language.tokens"
TOKEN_MASK_KEY = "observation.language.attention_mask"


@dataclass(frozen=True)
class DrawnBatch:
    """A training batch with its noise and time, before anything that has parameters.

    Attributes:
        plan: of its observations.
        counts: of tokens and images.
        is_pad_BT: action steps that do not exist; None where they count too.
        action_dims_B: action dimensions that each sample has; None where all have all.
    """

    plan: PrefixPlan
    counts: TokenCounts
    actions_BTA: Tensor
    noise_BFTA: Tensor
    time_BF: Tensor
    is_pad_BT: Tensor | None = None
    action_dims_B: Tensor | None = None

    def noisy_actions(self) -> Tensor:
        """``[R, T, A]``, what the action expert is given."""
        time_BF11 = self.time_BF[..., None, None]
        noisy_BFTA = time_BF11 * self.noise_BFTA + (1 - time_BF11) * self.actions_BTA[:, None]
        return noisy_BFTA.flatten(0, 1)

    def squared_error(self, velocity_RTA: Tensor) -> Tensor:
        """``[B, F, T, A]`` squared error of a velocity (upstream: ``PI05Pytorch.forward``)."""
        noise_BFTA = self.noise_BFTA
        return F.mse_loss(noise_BFTA - self.actions_BTA[:, None], velocity_RTA.view_as(noise_BFTA), reduction="none")


class Pi05FastPath:
    """Training forward and action sampling on a packed batch, with upstream's signatures."""

    def __init__(self, policy: Any, settings: FastPathSettings) -> None:
        self.policy = policy
        self.settings = settings
        self.token_counts: TokenCounts | None = None

    def forward(self, batch: dict[str, Any], reduction: str = "mean") -> tuple[Tensor, dict[str, Any]]:
        """Loss of a training batch (upstream: ``PI05Policy.forward``).

        Args:
            reduction: ``mean`` for a scalar, ``none`` for one loss a sample.

        Raises:
            ValueError: cameras that do not match, no ``action_is_pad`` with ``action_pad=mask``, or ``action_dims``
                beyond the policy's.
        """
        drawn = self.draw(batch)
        self.token_counts = drawn.counts
        return self.reduce(drawn, self._losses(drawn), reduction)

    def draw(self, batch: Mapping[str, Any]) -> DrawnBatch:
        """A training batch with its noise and time, drawn in upstream's order; raises as ``forward`` does."""
        actions_BTA = self.policy.prepare_action(batch)
        is_pad_BT = self._action_is_pad(batch, actions_BTA.device)
        if is_pad_BT is not None:
            actions_BTA = fill_padded_actions(actions_BTA, is_pad_BT)
        drawn = self._drawn(batch, actions_BTA)
        return replace(drawn, is_pad_BT=is_pad_BT, action_dims_B=self._action_dims(batch, actions_BTA.device))

    def reduce(self, drawn: DrawnBatch, losses_BFTA: Tensor, reduction: str = "mean") -> tuple[Tensor, dict[str, Any]]:
        """Loss of unreduced ``[B, F, T, A]`` losses, and what is logged of it."""
        losses_BFTA = losses_BFTA[..., : self._num_action_dims]
        if drawn.is_pad_BT is None and drawn.action_dims_B is None and not self.settings.uneven_batches:
            return reduce_all(losses_BFTA, reduction)
        valid_BTA = valid_elements(losses_BFTA, drawn.is_pad_BT, drawn.action_dims_B)
        return reduce_valid(losses_BFTA, valid_BTA, reduction, self.settings.reduce_count)

    def action_elements(self, batch: Mapping[str, Any]) -> int:
        """Elements that the loss of this batch is a mean over, flow samples included."""
        is_pad_BT = self._action_is_pad(batch, torch.device("cpu"))
        num_samples = batch["action"].shape[0]
        steps_B = torch.full((num_samples,), self.policy.config.chunk_size)
        if is_pad_BT is not None:
            steps_B = (~is_pad_BT).sum(dim=1)
        dims_B = self._action_dims(batch, torch.device("cpu"))
        if dims_B is None:
            dims_B = torch.full((num_samples,), self._num_action_dims)
        return int((steps_B * dims_B).sum()) * self.settings.flow_samples

    def losses(
        self,
        batch: Mapping[str, Any],
        actions_BTA: Tensor,
        noise_BFTA: Tensor | None = None,
        time_BF: Tensor | None = None,
    ) -> Tensor:
        """Unreduced losses ``[B, F, T, A]`` over the padded action dimensions (upstream: ``PI05Pytorch.forward``).

        Noise and time are drawn, in upstream's order, unless both are given.
        """
        drawn = self._drawn(batch, actions_BTA, noise_BFTA, time_BF)
        self.token_counts = drawn.counts
        return self._losses(drawn)

    def _losses(self, drawn: DrawnBatch) -> Tensor:
        time_R = drawn.time_BF.flatten()
        return drawn.squared_error(
            predict_velocity(self.policy, drawn.plan, drawn.noisy_actions(), time_R, self.settings)
        )

    def _drawn(
        self,
        batch: Mapping[str, Any],
        actions_BTA: Tensor,
        noise_BFTA: Tensor | None = None,
        time_BF: Tensor | None = None,
    ) -> DrawnBatch:
        cameras, plan = self._plan(batch, fixed_shapes=True)
        if noise_BFTA is None or time_BF is None:
            noise_BFTA, time_BF = draw_noise_and_time(self.policy.model, actions_BTA, self.settings.flow_samples)
        return DrawnBatch(plan, self._count(batch, cameras, plan), actions_BTA, noise_BFTA, time_BF)

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Any], **kwargs: Any) -> Tensor:
        """``[B, T, A]`` actions for observations (upstream: ``PI05Policy.predict_action_chunk``)."""
        self.policy.eval()
        noise_BTA = kwargs.pop("noise", None)
        _, plan = self._plan(batch)
        actions_BTA = ActionSampler(self.policy, plan, self.settings).sample(noise_BTA, **kwargs)
        return actions_BTA[..., : self._num_action_dims]

    def prefix_plan(self, batch: Mapping[str, Any]) -> PrefixPlan:
        """What is computed of the observations of a batch.

        Raises:
            ValueError: cameras that do not match, or no prompt.
        """
        return self._plan(batch)[1]

    @property
    def _num_action_dims(self) -> int:
        return int(self.policy.config.output_features["action"].shape[0])

    @staticmethod
    def _action_dims(batch: Mapping[str, Any], device: torch.device) -> Tensor | None:
        """``[B]``: action dimensions that each sample has, None where all have all."""
        dims_B = batch.get(ACTION_DIMS_KEY)
        return None if dims_B is None else dims_B.to(device)

    def _plan(self, batch: Mapping[str, Any], fixed_shapes: bool = False) -> tuple[CameraBatch, PrefixPlan]:
        tokens_BL = require_key(batch, TOKENS_KEY, "π0.5's prompt")
        mask_BL = require_key(batch, TOKEN_MASK_KEY, "π0.5's prompt")
        cameras = collect_cameras(self.policy, batch)
        return cameras, plan_prefix(self.policy, cameras, tokens_BL, mask_BL, self.settings, fixed_shapes)

    def _action_is_pad(self, batch: Mapping[str, Any], device: torch.device) -> Tensor | None:
        """The mask of padded action steps where it is asked for."""
        if self.settings.action_pad == "host":
            return None
        mask: Tensor = require_key(batch, ACTION_PAD_KEY, "action_pad=mask")
        return mask.to(device, torch.bool)

    def _count(self, batch: Mapping[str, Any], cameras: CameraBatch, plan: PrefixPlan) -> TokenCounts:
        layout = plan.layout
        num_suffix = layout.batch_size * self.settings.flow_samples * self.policy.config.chunk_size
        num_blank = layout.num_blank_samples * self.settings.flow_samples * self.policy.config.chunk_size
        num_steps = layout.batch_size * self.policy.config.chunk_size
        is_pad = batch.get(ACTION_PAD_KEY)
        images_upstream = cameras.present_BC.numel()
        language_length = layout.padded_length - cameras.present_BC.shape[1] * patches_per_image(self.policy)
        assert language_length == batch[TOKENS_KEY].shape[1]
        return TokenCounts(
            valid=layout.num_valid + num_suffix,
            computed=layout.num_computed + num_suffix + num_blank,
            upstream=layout.batch_size * layout.padded_length + num_suffix,
            images_computed=plan.num_images,
            images_upstream=images_upstream,
            action_valid=num_steps if is_pad is None else num_steps - int(is_pad.sum()),
            action_total=num_steps,
        )


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
