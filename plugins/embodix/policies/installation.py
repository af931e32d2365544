# SPDX-License-Identifier: Apache-2.0
"""What every fast path does to put its methods on one host policy and to take them off again."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from embodix.patching import version_problem
from embodix.policies.settings import FastPathSettings, TokenCounts
from embodix.policies.vision_attention import align_vision_attention

REPLACED_METHODS = ("forward", "predict_action_chunk")


class FastPath(Protocol):
    """The methods that replace upstream's on one policy."""

    settings: FastPathSettings
    token_counts: TokenCounts | None

    def forward(self, batch: dict[str, Any], reduction: str = "mean") -> Any: ...
    def predict_action_chunk(self, batch: dict[str, Any]) -> Any: ...
    def action_elements(self, batch: Mapping[str, Any]) -> int: ...


class MethodInstallation:
    """A fast path in place on one policy.

    Args:
        policy_type: the host's, for reports.
        vision_tower: its attention is aligned where the fast path does not use upstream's; None for none that has any.
    """

    def __init__(
        self, policy: nn.Module, fast_path: FastPath, policy_type: str, vision_tower: nn.Module | None = None
    ) -> None:
        self._policy, self._fast_path, self._policy_type = policy, fast_path, policy_type
        # Not bound methods: under mixed precision accelerate would bind their functions to the policy.
        self._methods = {name: functools.partial(getattr(fast_path, name)) for name in REPLACED_METHODS}
        for name, method in self._methods.items():
            setattr(policy, name, method)
        aligns = fast_path.settings.attention is not None and vision_tower is not None
        self._undo_vision = align_vision_attention(vision_tower) if aligns else lambda: None

    @property
    def token_counts(self) -> TokenCounts | None:
        """Counts of the last training step, None before the first."""
        return self._fast_path.token_counts

    def action_elements(self, batch: Mapping[str, Any]) -> int:
        """Elements that the loss of this batch is a mean over, flow samples included."""
        return self._fast_path.action_elements(batch)

    def uninstall(self) -> None:
        """Put upstream's methods back; a second call does nothing."""
        for name, method in self._methods.items():
            if self._policy.__dict__.get(name) is method:
                delattr(self._policy, name)
        self._undo_vision()

    def describe(self) -> dict[str, Any]:
        """What is installed, for reports."""
        return {
            "policy": self._policy_type,
            **self._fast_path.settings.describe(),
            "replaced": list(REPLACED_METHODS),
        }


def require_supported(policy_type: str, supported: Mapping[str, str]) -> None:
    """Refuse a host version that the fast path was not written for.

    Raises:
        ValueError: with the distribution and the versions wanted and found.
    """
    for distribution, wanted in supported.items():
        problem = version_problem(distribution, wanted)
        if problem:
            raise ValueError(f"The fast path of {policy_type} follows one upstream version: {problem}.")


def require_policy_class(policy: nn.Module, policy_type: str, host_class: type) -> None:
    """Refuse anything but the bare host policy.

    Raises:
        ValueError: another class, or a policy that is wrapped already.
    """
    if not isinstance(policy, host_class):
        found = getattr(policy, "name", None) or type(policy).__name__
        raise ValueError(
            f"The fast path of {policy_type} takes lerobot's {host_class.__name__}; got {found!r} "
            f"({type(policy).__module__}.{type(policy).__qualname__}). Choose the wrapper of that policy, and "
            "install before wrapping it in DDP or PEFT."
        )


def require_own_methods(policy: nn.Module) -> None:
    """Refuse a policy on which something has replaced methods already.

    Raises:
        ValueError: it has.
    """
    if any(name in policy.__dict__ for name in REPLACED_METHODS):
        raise ValueError("This policy already has replaced methods; uninstall them first.")
