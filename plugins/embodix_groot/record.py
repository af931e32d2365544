# SPDX-License-Identifier: Apache-2.0
"""All that embodix needs to know of GR00T-N1.5."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from embodix.contracts import (
    LanguageModel,
    MemorySaver,
    ModuleKind,
    PolicySupport,
    SampleLayout,
    SampleShape,
    ShardUnit,
    TensorPlan,
)

if TYPE_CHECKING:
    from pathlib import Path

    from lerobot.configs.train import TrainPipelineConfig
    from omegaconf import DictConfig
    from torch import Tensor

    from embodix.data.preprocessing import Merger
    from embodix.policies.settings import FastPathSettings
    from embodix_groot.flow import GrootFlow
    from embodix_groot.wrapper import GrootN15Wrapper

DECODER_LINEAR = r"layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
_EAGLE = r"_groot_model\.backbone\.eagle_model\."


class GrootN15(PolicySupport):
    """GR00T-N1.5 of LeRobot."""

    policy_type = "groot"
    display_name = "GR00T-N1.5"
    config_group = "groot_n15"
    supported: ClassVar[Mapping[str, str]] = {"lerobot": ">=0.5.1,<0.5.2"}
    sizes_patch = "lerobot_groot_sizes"
    module_kinds: ClassVar[Mapping[ModuleKind, str]] = {
        "language_linear": rf"{_EAGLE}language_model\.model\.{DECODER_LINEAR}",
        "embedding": rf"{_EAGLE}language_model\.model\.embed_tokens",
        "unused_head": rf"{_EAGLE}language_model\.lm_head",
        "vision": rf"{_EAGLE}vision_model\..+",
        "connector": rf"{_EAGLE}mlp1\..+|_groot_model\.backbone\.eagle_linear",
        "action_head": r"_groot_model\.action_head\..+",
    }
    language_model = LanguageModel("_groot_model.backbone.eagle_model.language_model.model", "Qwen3ForCausalLM")
    real_head_dim = 128
    real_name = "GR00T-N1.5 (2.4 B parameters, 224 px)"
    real_fields: ClassVar[Mapping[str, Any]] = {
        "image_size": [224, 224],
        "max_state_dim": 64,
        "max_action_dim": 32,
        "chunk_size": 50,
        "n_action_steps": 50,
    }
    memory_savers = (
        MemorySaver("tune_llm", False, "the language model is not trained", exact=False),
        MemorySaver("tune_visual", False, "the vision tower is not trained", exact=False),
        MemorySaver("tune_diffusion_model", False, "the diffusion transformer is not trained", exact=False),
    )
    valued_keys = ("eagle_input_ids",)
    peft_targets = r"_groot_model\.action_head\..*\.attn1\.to_[qkv]"  # what Isaac-GR00T adapts by default

    def patches(self, cfg: DictConfig) -> dict[str, dict[str, Any]]:
        return {"lerobot_groot_samples": {"language": cfg.language.name}}

    def config_notes(self, config: Any) -> Iterator[str]:
        if (trained := len(config.action_delta_indices)) < config.chunk_size:
            yield (
                f"policy.chunk_size={config.chunk_size} trains {trained} steps of actions: the action head of GR00T "
                f"predicts no more, and policy.n_action_steps={config.n_action_steps} plays no more."
            )

    def prepare_assets(self, cfg: DictConfig, host_cfg: TrainPipelineConfig) -> None:
        from embodix_groot.assets import prepare_host_assets

        prepare_host_assets(cfg, host_cfg)

    def normalisation(self, config: Any) -> tuple[Mapping[str, str], bool]:
        return {
            "STATE": "MIN_MAX",
            "ACTION": "MIN_MAX",
        }, True  # in its own step: lerobot/policies/groot/processor_groot.py

    def uses_tokenizer_directory(self) -> bool:
        return False  # ``policy.tokenizer_assets_repo`` names its folder

    def public_architecture(self) -> Mapping[str, Any]:
        from embodix_groot.architecture import PUBLIC_ARCHITECTURE

        return PUBLIC_ARCHITECTURE  # upstream would read them from the base model's folder

    def wrapper(self) -> GrootN15Wrapper:
        from embodix_groot.wrapper import GrootN15Wrapper

        return GrootN15Wrapper()

    def own_autocast(self, config: Any) -> str:
        return "bfloat16" if config.use_bf16 else "float32"  # opened inside that of the accelerator

    @contextmanager
    def switched_autocast(self, policy: Any, dtype: str) -> Iterator[None]:
        model, before = policy._groot_model, (policy.config.use_bf16, policy._groot_model.compute_dtype)
        policy.config.use_bf16, model.compute_dtype = dtype == "bfloat16", dtype
        try:
            yield
        finally:
            policy.config.use_bf16, model.compute_dtype = before

    def noise_shape(self, policy: Any, batch_size: int) -> tuple[int, int, int]:
        head = policy._groot_model.action_head.config
        return batch_size, head.action_horizon, head.action_dim

    def merger(self, policy_cfg: Any, members: Sequence[Any], preprocessors: Sequence[Any]) -> Merger:
        from embodix_groot.mixture import merger_of

        return merger_of(preprocessors[0])

    def flow(self, policy: Any, settings: FastPathSettings) -> GrootFlow:
        from embodix_groot.flow import GrootFlow

        return GrootFlow(policy, settings)

    def unread_parameters(self, policy: Any) -> Sequence[str]:
        from embodix_groot.sharding import unread_parameters

        return unread_parameters(policy)

    def shard_units(self, policy: Any) -> Sequence[ShardUnit]:
        from embodix_groot.sharding import shard_units

        return shard_units(policy)

    def tensor_plan(self, policy: Any) -> TensorPlan:
        from embodix_groot.sharding import tensor_plan

        return tensor_plan(policy)

    def sample_layout(self, policy: Any) -> SampleLayout:
        from embodix_groot.counting import sample_layout

        return sample_layout(policy)

    def sample_batch(self, policy: Any, shape: SampleShape, batch_size: int) -> dict[str, Tensor]:
        from embodix_groot.counting import sample_batch

        return sample_batch(policy, shape, batch_size)

    def prompt_texts(
        self, policy: Mapping[str, Any], task: str, images: int, state_stats: Mapping[str, list[float]]
    ) -> Mapping[str, float]:
        from embodix_groot.counting import prompt_text

        return {prompt_text(task, images): 1.0}

    def tokenizer_file(self, config: Mapping[str, Any]) -> Path | None:
        from embodix_groot.counting import tokenizer_file

        return tokenizer_file(config)

    def weights_reader(self) -> tuple[type, str]:
        from lerobot.policies.groot.modeling_groot import GrootPolicy

        return GrootPolicy, "_load_as_safetensor"
