# SPDX-License-Identifier: Apache-2.0
"""A small Gaussian policy whose inference and training take declared times.

Shape suffixes: B observations, S state components, C action steps of a chunk, A action dimensions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rlinf.models.embodiment.base_policy import BasePolicy
from torch import Tensor, nn
from torch.distributions import Normal

from embodix_rl.latency import BatchTime, spend


@dataclass(frozen=True)
class LatencySizes:
    """State components, action steps of a chunk, action dimensions and the width of the hidden layers."""

    state_dim: int
    num_action_chunks: int
    action_dim: int
    width: int = 64


class LatencyPolicy(nn.Module, BasePolicy):
    """An MLP policy with value head on RLinf's contract for embodied models.

    What is computed is real, so that weights, gradients and their exchange are; its time is negligible, and each call
    ends when the declared time is over.

    Args:
        sizes: of observation and action.
        inference: seconds of `predict_action_batch` by batch size.
        training: seconds of forward and backward of a micro-batch by its size, spent in the forward.
    """

    forward = BasePolicy.forward  # nn.Module has a stub; the bases in the other order can't be wrapped by FSDP

    def __init__(self, sizes: LatencySizes, inference: BatchTime, training: BatchTime) -> None:
        super().__init__()
        self._sizes, self._inference, self._training = sizes, inference, training
        action_size = sizes.num_action_chunks * sizes.action_dim
        self.backbone = nn.Sequential(
            nn.Linear(sizes.state_dim, sizes.width), nn.Tanh(), nn.Linear(sizes.width, sizes.width), nn.Tanh()
        )
        self.action_mean = nn.Linear(sizes.width, action_size)
        self.log_std = nn.Parameter(torch.full((action_size,), -0.5))
        self.value_head = nn.Linear(sizes.width, 1)

    @classmethod
    def of(cls, cfg: Mapping[str, Any]) -> LatencyPolicy:
        """From RLinf's ``actor.model``; the same seed gives every worker the same weights."""
        sizes = LatencySizes(cfg["state_dim"], cfg["num_action_chunks"], cfg["action_dim"], cfg["width"])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(cfg["seed"])
            return cls(sizes, BatchTime.of(cfg["inference_s"]), BatchTime.of(cfg["training_s"]))

    def predict_action_batch(
        self, env_obs: Mapping[str, Any], mode: Literal["train", "eval"] = "train", **_: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Actions [B, C, A] with log-probabilities [B, C, A] and values [B, 1]."""
        begun = time.perf_counter()
        states_BS = env_obs["states"].to(self.log_std.device, torch.float32)
        distribution, values_B1 = self._distribution(states_BS)
        actions = distribution.mean if mode == "eval" else distribution.sample()
        result = {
            "prev_logprobs": self._chunks(distribution.log_prob(actions)),
            "prev_values": values_B1,
            "forward_inputs": {"states": states_BS, "action": actions},
        }
        spend(self._inference.seconds(len(states_BS)), begun)
        return self._chunks(actions), result

    def default_forward(
        self,
        forward_inputs: Mapping[str, Tensor],
        compute_logprobs: bool = True,
        compute_entropy: bool = True,
        compute_values: bool = True,
        **_: Any,
    ) -> dict[str, Tensor]:
        """Log-probabilities and entropy [B, C, A] and values [B, 1] of earlier actions."""
        begun = time.perf_counter()
        distribution, values_B1 = self._distribution(forward_inputs["states"])
        outputs = {}
        if compute_logprobs:
            outputs["logprobs"] = self._chunks(distribution.log_prob(forward_inputs["action"]))
        if compute_entropy:
            outputs["entropy"] = self._chunks(distribution.entropy())
        if compute_values:
            outputs["values"] = values_B1
        spend(self._training.seconds(len(values_B1)), begun)
        return outputs

    def _distribution(self, states_BS: Tensor) -> tuple[Normal, Tensor]:
        hidden_BW = self.backbone(states_BS)
        mean = self.action_mean(hidden_BW)
        return Normal(mean, self.log_std.exp().expand_as(mean)), self.value_head(hidden_BW)

    def _chunks(self, flat: Tensor) -> Tensor:
        return flat.reshape(-1, self._sizes.num_action_chunks, self._sizes.action_dim)
