# SPDX-License-Identifier: Apache-2.0
"""Config of the policy, registered with LeRobot."""

from __future__ import annotations

from dataclasses import dataclass, field

from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import NormalizationMode
from lerobot.optim.optimizers import AdamWConfig

TOKENIZER = "example/prompted-tokenizer"


@PreTrainedConfig.register_subclass("prompted")
@dataclass
class PromptedConfig(PreTrainedConfig):
    """Widths and depths of a transformer over image patches, state and prompt, and of the head that denoises."""

    n_obs_steps: int = 1
    chunk_size: int = 6
    n_action_steps: int = 3
    max_state_dim: int = 16
    max_action_dim: int = 16
    num_inference_steps: int = 4
    width: int = 32
    mlp_dim: int = 64
    depth: int = 2
    num_heads: int = 4
    vocab_size: int = 2048
    patch_size: int = 14
    tokenizer_max_length: int = 32
    optimizer_lr: float = 1e-3
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: {
            "VISUAL": NormalizationMode.IDENTITY,
            "STATE": NormalizationMode.MEAN_STD,
            "ACTION": NormalizationMode.MEAN_STD,
        }
    )

    @property
    def observation_delta_indices(self) -> None:
        return None

    @property
    def action_delta_indices(self) -> list[int]:
        return list(range(self.chunk_size))

    @property
    def reward_delta_indices(self) -> None:
        return None

    def validate_features(self) -> None:
        if not self.image_features:
            raise ValueError("The policy looks through one camera at least; got none.")

    def get_optimizer_preset(self) -> AdamWConfig:
        return AdamWConfig(lr=self.optimizer_lr)

    def get_scheduler_preset(self) -> None:
        return None
