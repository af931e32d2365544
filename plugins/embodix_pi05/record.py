# SPDX-License-Identifier: Apache-2.0
"""All that embodix needs to know of π0.5."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from embodix.contracts import (
    LanguageModel,
    MemorySaver,
    ModuleKind,
    PolicySupport,
    SampleLayout,
    SampleShape,
    ShardUnit,
    ShortenedTask,
    TensorPlan,
)

if TYPE_CHECKING:
    from torch import Tensor

    from embodix.data.preprocessing import Merger
    from embodix.data.sample_sizes import SizedDataset
    from embodix.policies.settings import FastPathSettings
    from embodix_pi05.flow import Pi05Flow
    from embodix_pi05.stages import Pi05Stages
    from embodix_pi05.wrapper import Pi05Wrapper

DECODER_LINEAR = r"layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
PATCH_SIZE = 14  # of PaliGemma's vision tower
_WITH_EXPERT = r"model\.paligemma_with_expert\."


class Pi05(PolicySupport):
    """π0.5 of LeRobot."""

    policy_type = "pi05"
    display_name = "π0.5"
    config_group = "pi05"
    supported: ClassVar[Mapping[str, str]] = {"lerobot": ">=0.5.1,<0.5.2"}
    sizes_patch = "lerobot_pi05_sizes"
    guards = ("lerobot_pi05_strict_load", "lerobot_pi05_prompts")
    # Full paths, because names mislead: every one of them holds "expert" (``paligemma_with_expert``).
    module_kinds: ClassVar[Mapping[ModuleKind, str]] = {
        "language_linear": rf"{_WITH_EXPERT}paligemma\.model\.language_model\.{DECODER_LINEAR}",
        "embedding": rf"{_WITH_EXPERT}paligemma\.model\.language_model\.embed_tokens",
        "unused_head": rf"{_WITH_EXPERT}(paligemma|gemma_expert)\.lm_head",
        "vision": rf"{_WITH_EXPERT}paligemma\.model\.vision_tower\..+",
        "connector": rf"{_WITH_EXPERT}paligemma\.model\.multi_modal_projector\..+",
        "action_head": rf"{_WITH_EXPERT}gemma_expert\.model\..+|model\.(action_(in|out)_proj|time_mlp_(in|out))",
    }
    kept_modules: ClassVar[Mapping[str, str]] = {
        rf"{_WITH_EXPERT}gemma_expert\.lm_head": "head that nothing reads, of the action expert: always in high "
        "precision"
    }
    language_model = LanguageModel("model.paligemma_with_expert.paligemma.model.language_model", "GemmaForCausalLM")
    real_head_dim = 256
    blank_cameras = "observation.images.empty_camera"
    tokenizer_hub_id = "google/paligemma-3b-pt-224"  # lerobot/policies/pi05/processor_pi05.py
    tokenizer_config: ClassVar[Mapping[str, Any]] = {"model_type": "paligemma"}
    real_name = "π0.5 at its real size (4.1 B parameters, 224 px, prompts padded to 200)"
    real_fields: ClassVar[Mapping[str, Any]] = {
        "image_resolution": [224, 224],
        "tokenizer_max_length": 200,
        "chunk_size": 50,
        "n_action_steps": 50,
        "max_state_dim": 32,
        "max_action_dim": 32,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
    }
    memory_savers = (
        MemorySaver(
            "gradient_checkpointing",
            True,
            "computes the forward pass again: about a third more time, under upstream's nesting more",
            exact=True,
        ),
        MemorySaver("dtype", "bfloat16", "rounding of bfloat16, in weights and optimizer too", exact=False),
        MemorySaver("train_expert_only", True, "the vision-language model is not trained", exact=False),
    )

    def config_faults(self, config: Any, architecture: Mapping[str, Any] | None) -> Iterator[str]:
        height, width = config.image_resolution
        patch = PATCH_SIZE if architecture is None else (architecture.get("vision") or {}).get("patch_size", PATCH_SIZE)
        if height != width or height < 1:
            yield f"policy.image_resolution is a square of 1 pixel at least; got {[height, width]}."
        elif height % patch:
            yield f"policy.image_resolution must be a multiple of the patch of {patch} pixels; got {[height, width]}."

    def wrapper(self) -> Pi05Wrapper:
        from embodix_pi05.wrapper import Pi05Wrapper

        return Pi05Wrapper()

    def noise_shape(self, policy: Any, batch_size: int) -> tuple[int, int, int]:
        return batch_size, policy.config.chunk_size, policy.config.max_action_dim

    def merger(self, policy_cfg: Any, members: Sequence[Any], preprocessors: Sequence[Any]) -> Merger:
        from embodix_pi05.mixture import merger_of

        return merger_of(policy_cfg, members)

    def flow(self, policy: Any, settings: FastPathSettings) -> Pi05Flow:
        from embodix_pi05.flow import Pi05Flow

        return Pi05Flow(policy, settings)

    def unread_parameters(self, policy: Any) -> Sequence[str]:
        from embodix_pi05.sharding import unread_parameters

        return unread_parameters(policy)

    def shard_units(self, policy: Any) -> Sequence[ShardUnit]:
        from embodix_pi05.sharding import shard_units

        return shard_units(policy)

    def tensor_plan(self, policy: Any) -> TensorPlan:
        from embodix_pi05.sharding import tensor_plan

        return tensor_plan(policy)

    def pipeline_stages(self, policy: Any, num_stages: int) -> Pi05Stages:
        from embodix_pi05.stages import Pi05Stages

        return Pi05Stages(policy, num_stages)

    def sample_layout(self, policy: Any) -> SampleLayout:
        from embodix_pi05.counting import sample_layout

        return sample_layout(policy)

    def sample_batch(self, policy: Any, shape: SampleShape, batch_size: int) -> dict[str, Tensor]:
        from embodix_pi05.counting import sample_batch

        return sample_batch(policy, shape, batch_size)

    def prompt_texts(
        self, policy: Mapping[str, Any], task: str, images: int, state_stats: Mapping[str, list[float]]
    ) -> Mapping[str, float]:
        from embodix_pi05.counting import prompt_texts

        return prompt_texts(policy, task, state_stats)

    def shortened_tasks(self, part: SizedDataset) -> Sequence[ShortenedTask]:
        from embodix.patching import is_applied
        from embodix_pi05.prompts import shortened_tasks

        return shortened_tasks(part) if is_applied("lerobot_pi05_prompts") else ()

    def shortened_so_far(self, preprocessor: Any) -> Sequence[ShortenedTask]:
        from embodix_pi05.prompts import shortened_so_far

        return shortened_so_far(preprocessor)

    def policy_names(self, policy: Any, file_values: Mapping[str, Any]) -> Mapping[str, Any]:
        fixed = policy._fix_pytorch_state_dict_keys(file_values, policy.config)
        # lerobot/policies/pi05/modeling_pi05.py, from_pretrained: files of openpi lack the prefix.
        return {name if name.startswith("model.") else f"model.{name}": value for name, value in fixed.items()}

    def weights_reader(self) -> tuple[type, str]:
        from lerobot.policies.pi05.modeling_pi05 import PI05Policy

        return PI05Policy, "from_pretrained"
