# SPDX-License-Identifier: Apache-2.0
"""All that embodix needs to know of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from embodix.contracts import ModuleKind, PolicySupport


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

    def weights_reader(self) -> tuple[type, str]:
        from lerobot_policy_prompted.modeling_prompted import PromptedPolicy

        return PromptedPolicy, "_load_as_safetensor"
