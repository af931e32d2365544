# SPDX-License-Identifier: Apache-2.0
"""Install the packed π0.5 on one instance of upstream's ``PI05Policy``, and tell the sizes of its samples.

The prompt holds the state, so that each sample is tokenised: prompts are built and tokenised by upstream's own
processor steps, from the state and task columns alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from embodix.data.sample_sizes import SizedDataset
from embodix.packing.sample_cost import IntArray, SampleSizes
from embodix.policies.installation import (
    MethodInstallation,
    require_own_methods,
    require_policy_class,
    require_supported,
)
from embodix.policies.settings import FastPathSettings
from embodix_pi05.fast_path import Pi05FastPath
from embodix_pi05.prefix import patches_per_image
from embodix_pi05.prompts import PROMPTS_AT_A_TIME, PromptParts


class Pi05Installation(MethodInstallation):
    """The fast path in place on one policy."""

    def __init__(self, policy: nn.Module, fast_path: Pi05FastPath) -> None:
        tower = fast_path.policy.model.paligemma_with_expert.paligemma.model.vision_tower
        super().__init__(policy, fast_path, Pi05Wrapper.policy_type, tower)
        self.fast_path = fast_path

    def describe(self) -> dict[str, Any]:
        """What is installed, for reports."""
        enabled = self.fast_path.policy.model.gradient_checkpointing_enabled
        return {**super().describe(), "gradient_checkpointing": "one level a layer" if enabled else "off"}


class Pi05Wrapper:
    """Sets ``forward`` and ``predict_action_chunk`` on the instance; parameters, names and checkpoints stay."""

    policy_type = "pi05"
    supported: Mapping[str, str] = {"lerobot": ">=0.5.1,<0.5.2"}

    def install(self, policy: nn.Module, settings: FastPathSettings) -> Pi05Installation:
        """Install before DDP or autocast wrap the policy.

        Raises:
            ValueError: lerobot out of range, another policy type, ``compile_model``, or already installed.
        """
        require_supported(self.policy_type, self.supported)
        self._require_policy(policy)
        return Pi05Installation(policy, Pi05FastPath(policy, settings))

    def sample_sizes(
        self, policy: Any, datasets: Sequence[SizedDataset], flow_samples: int, progress: Callable[[int], None]
    ) -> SampleSizes:
        """Tokens and images of every sample, for packers that compose batches."""
        return sample_sizes(policy, datasets, flow_samples, progress)

    def head_dim(self, policy: Any) -> int:
        """Channels of one attention head, the same in the language model and the action expert."""
        return int(policy.model.paligemma_with_expert.paligemma.config.text_config.head_dim)

    def _require_policy(self, policy: Any) -> None:
        from lerobot.policies.pi05.modeling_pi05 import PI05Policy

        require_policy_class(policy, self.policy_type, PI05Policy)
        if policy.config.compile_model:
            raise ValueError(
                "compile_model=true compiles upstream's dense forward, which the fast path replaces. "
                "Set policy.compile_model=false, or put packing, attention and vision_tokens back to upstream."
            )
        require_own_methods(policy)


TOKEN_MASK_KEY = "observation.language.attention_mask"


def sample_sizes(
    policy: Any, datasets: Sequence[SizedDataset], flow_samples: int, progress: Callable[[int], None]
) -> SampleSizes:
    """Sizes of all samples, data set after data set; see ``embodix.data.sample_sizes``."""
    num_patches = patches_per_image(policy)
    prompts, images = [], []
    for part in datasets:
        prompts.append(_prompt_lengths(part, progress))
        present = [key for key in policy.config.image_features if key in part.preprocessed([0])]
        images.append(len(present) - part.num_absent())
    images_N = np.concatenate(images)
    prefix_N = np.concatenate(prompts) + images_N * num_patches
    return SampleSizes(prefix_N, images_N, policy.config.chunk_size * flow_samples)


def _prompt_lengths(part: SizedDataset, progress: Callable[[int], None]) -> IntArray:
    parts, lengths = PromptParts(part), []
    for start in range(0, len(part), PROMPTS_AT_A_TIME):
        mask_BL = part.preprocess(parts.batch(slice(start, start + PROMPTS_AT_A_TIME)))[TOKEN_MASK_KEY]
        lengths.append(mask_BL.sum(dim=1).cpu().numpy().astype(np.int64))
        progress(len(lengths[-1]))
    return np.concatenate(lengths)
