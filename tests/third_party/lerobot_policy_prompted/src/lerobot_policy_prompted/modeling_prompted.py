# SPDX-License-Identifier: Apache-2.0
"""The policy as its authors publish it: padded, with a mask.

Shape suffixes: B samples, C cameras, P patches an image, L prompt tokens (padded), S = C * P + 1 + L rows, W width,
H heads, D channels a head, T action steps, A padded action dimensions.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor, nn

from lerobot_policy_prompted.configuration_prompted import PromptedConfig

TOKENS, TOKEN_MASK = "observation.language.tokens", "observation.language.attention_mask"
STATE, ACTION = "observation.state", "action"


class Attention(nn.Module):
    """Projections of one attention, and the attention over padded rows."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(width, width))

    def heads(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, ``[..., H, D]``."""
        q, k, v = (
            projection(rows).unflatten(-1, (self.num_heads, -1))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return q, k, v

    def forward(self, rows_BSW: Tensor, valid_BS: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.heads(rows_BSW))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=valid_BS[:, None, None, :])
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int, mlp_dim: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, mlp_dim), nn.Linear(mlp_dim, width)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(rows)))


class Layer(nn.Module):
    def __init__(self, config: PromptedConfig) -> None:
        super().__init__()
        self.input_norm, self.mlp_norm = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.self_attn, self.mlp = Attention(config.width, config.num_heads), Mlp(config.width, config.mlp_dim)

    def forward(self, rows_BSW: Tensor, valid_BS: Tensor) -> Tensor:
        rows_BSW = rows_BSW + self.self_attn(self.input_norm(rows_BSW), valid_BS)
        return rows_BSW + self.mlp(self.mlp_norm(rows_BSW))


class ActionHead(nn.Module):
    """Velocity of noisy actions, given what was seen."""

    def __init__(self, config: PromptedConfig) -> None:
        super().__init__()
        num_actions = config.chunk_size * config.max_action_dim
        self.hidden = nn.Linear(config.width + num_actions + 1, config.mlp_dim)
        self.out = nn.Linear(config.mlp_dim, num_actions)

    def forward(self, seen_BW: Tensor, noisy_BTA: Tensor, time_B: Tensor) -> Tensor:
        features = torch.cat([seen_BW, noisy_BTA.flatten(1), time_B[:, None]], dim=1)
        return self.out(F.gelu(self.hidden(features))).view_as(noisy_BTA)


class PromptedPolicy(PreTrainedPolicy):
    """Flow matching: step 0 is noise, the velocity is noise minus action."""

    config_class = PromptedConfig
    name = "prompted"

    def __init__(self, config: PromptedConfig, **kwargs: Any) -> None:
        super().__init__(config)
        config.validate_features()
        self.config = config
        self.patches = nn.Conv2d(3, config.width, config.patch_size, stride=config.patch_size)
        self.state = nn.Linear(config.max_state_dim, config.width)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.tokenizer_max_length, config.width)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.depth)])
        self.norm = nn.LayerNorm(config.width)
        self.action_head = ActionHead(config)
        self.reset()

    def get_optim_params(self) -> Any:
        return self.parameters()

    def reset(self) -> None:
        self._queue: deque[Tensor] = deque()

    def forward(self, batch: dict[str, Any], reduction: str = "mean") -> tuple[Tensor, dict[str, Any]]:
        """Loss of a batch."""
        losses_BTA = self.losses(self.seen(batch), self.padded(batch[ACTION], self.config.max_action_dim))
        loss = losses_BTA[..., : self.num_action_dims].mean(dim=(1, 2))
        loss = loss if reduction == "none" else loss.mean()
        return loss, {"loss": loss.mean().item()}

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Any], **kwargs: Any) -> Tensor:
        """``[B, T, A]`` actions."""
        self.eval()
        return self.denoise(self.seen(batch), kwargs.get("noise"))[..., : self.num_action_dims]

    @torch.no_grad()
    def select_action(self, batch: dict[str, Any], **kwargs: Any) -> Tensor:
        """The next action ``[B, A]``."""
        if not self._queue:
            chunk_BTA = self.predict_action_chunk(batch, **kwargs)
            self._queue.extend(chunk_BTA[:, : self.config.n_action_steps].transpose(0, 1))
        return self._queue.popleft()

    @property
    def num_action_dims(self) -> int:
        return int(self.config.output_features[ACTION].shape[0])

    def seen(self, batch: dict[str, Any]) -> Tensor:
        """``[B, W]`` mean of the rows that exist."""
        rows_BSW, valid_BS = self.embed(batch), self.valid(batch)
        for layer in self.layers:
            rows_BSW = layer(rows_BSW, valid_BS)
        weights_BS1 = valid_BS[..., None] / valid_BS.sum(dim=1)[:, None, None]
        return (self.norm(rows_BSW) * weights_BS1).sum(dim=1)

    def cameras(self, batch: dict[str, Any]) -> list[str]:
        """Keys of the cameras that the batch has."""
        return [key for key in self.config.image_features if key in batch]

    def embed(self, batch: dict[str, Any]) -> Tensor:
        """``[B, S, W]`` image patches camera by camera, state, prompt."""
        images = [self.patches(batch[key]).flatten(2).transpose(1, 2) for key in self.cameras(batch)]
        state_B1W = self.state(self.padded(batch[STATE], self.config.max_state_dim))[:, None]
        tokens_BL = batch[TOKENS]
        prompt_BLW = self.embed_tokens(tokens_BL) + self.positions.weight[: tokens_BL.shape[1]]
        return torch.cat([*images, state_B1W, prompt_BLW], dim=1)

    def num_patches(self, batch: dict[str, Any]) -> int:
        """Rows of one image."""
        height, width = batch[self.cameras(batch)[0]].shape[2:]
        return (height // self.config.patch_size) * (width // self.config.patch_size)

    def valid(self, batch: dict[str, Any]) -> Tensor:
        """``[B, S]`` bool: rows that exist, blank cameras among them."""
        mask_BL = batch[TOKEN_MASK].bool()
        num_rows = self.num_patches(batch) * len(self.cameras(batch)) + 1
        return torch.cat([mask_BL.new_ones(mask_BL.shape[0], num_rows), mask_BL], dim=1)

    def losses(self, seen_BW: Tensor, actions_BTA: Tensor) -> Tensor:
        """``[B, T, A]`` squared error of the velocity, at a noise and a time that are drawn here."""
        noise_BTA = torch.randn(actions_BTA.shape, device=actions_BTA.device)
        time_B = torch.rand(actions_BTA.shape[0], device=actions_BTA.device)
        time_B11 = time_B[:, None, None]
        noisy_BTA = time_B11 * noise_BTA + (1 - time_B11) * actions_BTA
        velocity_BTA = self.action_head(seen_BW, noisy_BTA, time_B)
        return F.mse_loss(velocity_BTA, noise_BTA - actions_BTA, reduction="none")

    def denoise(self, seen_BW: Tensor, noise_BTA: Tensor | None = None, observe: Any = None) -> Tensor:
        """``[B, T, A]`` actions, padded dimensions included."""
        config, num_steps = self.config, self.config.num_inference_steps
        if noise_BTA is None:
            shape = (seen_BW.shape[0], config.chunk_size, config.max_action_dim)
            noise_BTA = torch.randn(shape, device=seen_BW.device)
        x_BTA = noise_BTA
        for step in range(num_steps):
            time_B = seen_BW.new_full((seen_BW.shape[0],), 1 - step / num_steps)
            x_BTA = x_BTA - self.action_head(seen_BW, x_BTA, time_B) / num_steps
            if observe is not None:
                observe(step, x_BTA)
        return x_BTA

    @staticmethod
    def padded(vectors: Tensor, size: int) -> Tensor:
        """Zeros behind the last dimension."""
        return F.pad(vectors, (0, size - vectors.shape[-1]))
