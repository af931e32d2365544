# SPDX-License-Identifier: Apache-2.0
"""Install the packed π0.5 on one instance of upstream's ``PI05Policy``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from embodix.data.sample_sizes import SizedDataset
from embodix.packing.sample_cost import SampleSizes
from embodix.policies.installation import (
    MethodInstallation,
    require_own_methods,
    require_policy_class,
    require_supported,
)
from embodix.policies.settings import FastPathSettings
from embodix_pi05.fast_path import Pi05FastPath
from embodix_pi05.sample_sizes import sample_sizes


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
