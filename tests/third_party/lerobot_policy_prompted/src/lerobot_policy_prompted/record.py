# SPDX-License-Identifier: Apache-2.0
"""All that embodix needs to know of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from embodix.contracts import ModuleKind, PolicySupport, SampleLayout, SampleShape


class Prompted(PolicySupport):
    """The policy with prompts and cameras."""

    policy_type = "prompted"
    display_name = "Prompted"
    config_group = "prompted"
    supported: ClassVar[Mapping[str, str]] = {"lerobot": ">=0.5.1,<0.6"}
    module_kinds: ClassVar[Mapping[ModuleKind, str]] = {
        "language_linear": r"layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(up|down)_proj)",
        "embedding": r"embed_tokens",
        "vision": r"patches",
        "action_head": r"action_head\..+",
    }
    real_head_dim = 8
    tokenizer_hub_id = "example/prompted-tokenizer"
    tokenizer_config: ClassVar[Mapping[str, Any]] = {"model_type": "gemma"}

    def wrapper(self) -> Any:
        from lerobot_policy_prompted.packed import PromptedWrapper

        return PromptedWrapper()

    def noise_shape(self, policy: Any, batch_size: int) -> tuple[int, int, int]:
        return batch_size, policy.config.chunk_size, policy.config.max_action_dim

    def merger(self, policy_cfg: Any, members: Sequence[Any], preprocessors: Sequence[Any]) -> Any:
        from embodix.data.merging import merger_with_slots

        return merger_with_slots(policy_cfg, members)

    def sample_layout(self, policy: Any) -> SampleLayout:
        config = policy.config
        _, height, width = next(iter(config.image_features.values())).shape
        patches = (height // config.patch_size) * (width // config.patch_size)
        return SampleLayout(patches, 0, config.tokenizer_max_length, len(config.image_features))

    def sample_batch(self, policy: Any, shape: SampleShape, batch_size: int) -> dict[str, Any]:
        import torch

        config = policy.config
        cameras = list(config.image_features.items())[: shape.images]
        batch = {key: torch.zeros(batch_size, *feature.shape) for key, feature in cameras}
        mask_L = torch.arange(config.tokenizer_max_length) < shape.prompt
        batch["observation.language.attention_mask"] = mask_L.repeat(batch_size, 1)
        batch["observation.language.tokens"] = torch.zeros(batch_size, config.tokenizer_max_length, dtype=torch.int64)
        batch["observation.state"] = torch.zeros(batch_size, config.max_state_dim)
        batch["action"] = torch.zeros(batch_size, config.chunk_size, config.max_action_dim)
        return batch

    def weights_reader(self) -> tuple[type, str]:
        from lerobot_policy_prompted.modeling_prompted import PromptedPolicy

        return PromptedPolicy, "_load_as_safetensor"
