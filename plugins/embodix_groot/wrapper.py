# SPDX-License-Identifier: Apache-2.0
"""Install the packed GR00T-N1.5 on one instance of upstream's ``GrootPolicy``, and tell the sizes of its samples.

Prompt tokens and images depend on the task and the data set's cameras only: one sample of each task goes through
upstream's own preprocessor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from embodix.contracts import ShapePadder
from embodix.data.sample_sizes import SizedDataset
from embodix.packing.sample_cost import SampleSizes
from embodix.policies.installation import (
    MethodInstallation,
    require_own_methods,
    require_policy_class,
    require_supported,
)
from embodix.policies.settings import FastPathSettings, ReferenceCheck
from embodix_groot.action_head import num_action_tokens
from embodix_groot.fast_path import GrootFastPath
from embodix_groot.reference import check_reference


class GrootInstallation(MethodInstallation):
    """The fast path in place on one policy."""

    def __init__(self, policy: nn.Module, fast_path: GrootFastPath) -> None:
        tower = fast_path.policy._groot_model.backbone.eagle_model.vision_model
        super().__init__(policy, fast_path, GrootN15Wrapper.policy_type, tower)
        self.fast_path = fast_path

    def check_reference(self, batch: Mapping[str, Any]) -> ReferenceCheck:
        """Compare with upstream run one sample at a time."""
        return check_reference(self._policy, batch, self.fast_path.settings)


class GrootN15Wrapper:
    """Sets ``forward`` and ``predict_action_chunk`` on the instance; parameters, names and checkpoints stay.

    ``vision_tokens`` makes no difference here: upstream's batch has no images of absent cameras.
    """

    policy_type = "groot"
    supported: Mapping[str, str] = {"lerobot": ">=0.5.1,<0.5.2"}

    def install(self, policy: nn.Module, settings: FastPathSettings) -> GrootInstallation:
        """Install before DDP or autocast wrap the policy.

        Raises:
            ValueError: lerobot out of range, another policy type, a config that the packed computation does not cover,
                a packer for fixed shapes, or already installed.
        """
        require_supported(self.policy_type, self.supported)
        self._require_policy(policy)
        if isinstance(settings.packer, ShapePadder):
            raise ValueError(
                f"The packed GR00T computes valid rows, not fixed shapes; packing={settings.packer.name} would have no "
                "effect on its shapes. Choose packing=token_budget."
            )
        return GrootInstallation(policy, GrootFastPath(policy, settings))

    def sample_sizes(
        self, policy: Any, datasets: Sequence[SizedDataset], flow_samples: int, progress: Callable[[int], None]
    ) -> SampleSizes:
        """Tokens and images of every sample, for packers that compose batches."""
        return sample_sizes(policy, datasets, flow_samples, progress)

    def head_dim(self, policy: Any) -> int:
        """Channels of one attention head of the language model, the widest of the three transformers."""
        return int(policy._groot_model.backbone.eagle_model.language_model.model.layers[0].self_attn.head_dim)

    def _require_policy(self, policy: Any) -> None:
        from lerobot.policies.groot.modeling_groot import GrootPolicy

        require_policy_class(policy, self.policy_type, GrootPolicy)
        require_own_methods(policy)
        problems = list(_uncovered(policy._groot_model))
        if problems:
            raise ValueError(
                f"The packed GR00T does not cover this model: {'; '.join(problems)}. "
                "Set packing, attention, vision_tokens and action_pad to upstream's."
            )


def _uncovered(model: Any) -> Iterator[str]:
    """What of this model the packed computation would get wrong."""
    from transformers import Qwen3ForCausalLM, SiglipVisionModel

    backbone = model.backbone
    eagle, language = backbone.eagle_model, backbone.eagle_model.language_model
    if not isinstance(language, Qwen3ForCausalLM) or not isinstance(eagle.vision_model, SiglipVisionModel):
        yield f"it has {type(language).__name__} on {type(eagle.vision_model).__name__}, not Qwen3 on SigLIP"
        return
    if len(language.model.layers) != backbone.select_layer:
        yield f"select_layer is {backbone.select_layer} and the language model has {len(language.model.layers)} layers"
    if language.model.has_sliding_layers:
        yield "its language model has sliding-window layers"
    if backbone.tune_llm and language.config.attention_dropout > 0:
        yield f"attention_dropout is {language.config.attention_dropout} in a tuned language model"
    if model.action_head.config.expand_batch is not None:
        yield f"expand_batch is {model.action_head.config.expand_batch} (flow_samples draws several times instead)"


def sample_sizes(
    policy: Any, datasets: Sequence[SizedDataset], flow_samples: int, progress: Callable[[int], None]
) -> SampleSizes:
    """Sizes of all samples, data set after data set; see ``embodix.data.sample_sizes``."""
    prefix, images = [], []
    num_actions = 0
    for part in datasets:
        tasks_N = part.column("task_index").reshape(-1)
        _, first, task_of_sample = np.unique(tasks_N, return_index=True, return_inverse=True)
        batches = [part.preprocessed([int(index)]) for index in first]
        lengths = np.array([int(batch["eagle_attention_mask"].sum()) for batch in batches], dtype=np.int64)
        counts = np.array([batch["eagle_pixel_values"].shape[0] for batch in batches], dtype=np.int64)
        prefix.append(lengths[task_of_sample])
        images.append(counts[task_of_sample])
        num_actions = num_action_tokens(policy._groot_model.action_head, batches[0]["state"].shape[1])
        progress(len(part))
    return SampleSizes(np.concatenate(prefix), np.concatenate(images), num_actions * flow_samples)
