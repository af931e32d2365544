# SPDX-License-Identifier: Apache-2.0
"""Install the packed π0.5 on one instance of upstream's ``PI05Policy``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from embodix.packing.sizes import SampleSizes
from embodix.patching import version_problem
from embodix.policies.pi05.fast_path import Pi05FastPath
from embodix.policies.pi05.sample_sizes import sample_sizes
from embodix.policies.sample_sizes import SizedDataset
from embodix.policies.settings import FastPathSettings, TokenCounts
from embodix.policies.vision_attention import align_vision_attention

REPLACED_METHODS = ("forward", "predict_action_chunk")


class Pi05Installation:
    """The fast path in place on one policy."""

    def __init__(self, policy: nn.Module, fast_path: Pi05FastPath) -> None:
        self._policy = policy
        self.fast_path = fast_path
        for name in REPLACED_METHODS:
            setattr(policy, name, getattr(fast_path, name))
        upstream_attention = fast_path.settings.attention is None
        tower = fast_path.policy.model.paligemma_with_expert.paligemma.model.vision_tower
        self._undo_vision = (lambda: None) if upstream_attention else align_vision_attention(tower)

    @property
    def token_counts(self) -> TokenCounts | None:
        """Counts of the last training step, None before the first."""
        return self.fast_path.token_counts

    def action_elements(self, batch: Mapping[str, Any]) -> int:
        """Elements that the loss of this batch is a mean over, flow samples included."""
        return self.fast_path.action_elements(batch)

    def uninstall(self) -> None:
        """Put upstream's methods back; a second call does nothing."""
        for name in REPLACED_METHODS:
            if getattr(self._policy.__dict__.get(name), "__self__", None) is self.fast_path:
                delattr(self._policy, name)
        self._undo_vision()

    def describe(self) -> dict[str, Any]:
        """What is installed, for reports."""
        return {
            "policy": Pi05Wrapper.policy_type,
            **self.fast_path.settings.describe(),
            "replaced": list(REPLACED_METHODS),
            "gradient_checkpointing": (
                "one level a layer" if self.fast_path.policy.model.gradient_checkpointing_enabled else "off"
            ),
        }


class Pi05Wrapper:
    """Sets ``forward`` and ``predict_action_chunk`` on the instance; parameters, names and checkpoints stay."""

    policy_type = "pi05"
    supported: Mapping[str, str] = {"lerobot": ">=0.5.1,<0.5.2"}

    def install(self, policy: nn.Module, settings: FastPathSettings) -> Pi05Installation:
        """Install before DDP or autocast wrap the policy.

        Raises:
            ValueError: lerobot out of range, another policy type, ``compile_model``, or already installed.
        """
        for distribution, wanted in self.supported.items():
            problem = version_problem(distribution, wanted)
            if problem:
                raise ValueError(f"The fast path of {self.policy_type} follows one upstream version: {problem}.")
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

        if not isinstance(policy, PI05Policy):
            found = getattr(policy, "name", None) or type(policy).__name__
            raise ValueError(
                f"The fast path of {self.policy_type} takes lerobot's PI05Policy; got {found!r} "
                f"({type(policy).__module__}.{type(policy).__qualname__}). Choose the wrapper of that policy, and "
                "install before wrapping it in DDP or PEFT."
            )
        if policy.config.compile_model:
            raise ValueError(
                "compile_model=true compiles upstream's dense forward, which the fast path replaces. "
                "Set policy.compile_model=false, or put packing, attention and vision_tokens back to upstream."
            )
        if any(name in policy.__dict__ for name in REPLACED_METHODS):
            raise ValueError("This policy already has replaced methods; uninstall them first.")
