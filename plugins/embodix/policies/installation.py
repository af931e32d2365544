# SPDX-License-Identifier: Apache-2.0
"""Putting a fast path's methods on one host policy, taking them off again, and the refusals that all fast paths share.

While a fast path is in place on a CPU, SigLIP's attention gets head dimensions that torch's kernel likes: the fused
kernel is about twice as slow where head_dim is no multiple of 8. Zeros appended to q, k and v change no score and no
output, so the function stays the same; a real SigLIP (72) needs no padding.

Shape suffixes: B images, H heads, L patches, D head_dim.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from embodix.patching import version_problem
from embodix.policies.settings import FastPathSettings, TokenCounts

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


def installed_fast_path(policy: nn.Module) -> Any:
    """The fast path in place on a policy.

    Raises:
        ValueError: there is none.
    """
    method = policy.__dict__.get(REPLACED_METHODS[0])
    if not isinstance(method, functools.partial):
        raise ValueError(
            f"Nothing has replaced the methods of this {type(policy).__name__}; install its wrapper first."
        )
    return method.func.__self__  # type: ignore[attr-defined]


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
            "install before wrapping it in DDP, and below a model of PEFT (embodix.policies.adapters.bare_policy)."
        )


def require_own_methods(policy: nn.Module) -> None:
    """Refuse a policy on which something has replaced methods already.

    Raises:
        ValueError: it has.
    """
    if any(name in policy.__dict__ for name in REPLACED_METHODS):
        raise ValueError("This policy already has replaced methods; uninstall them first.")


ALIGNED_ATTENTION = "embodix_aligned_sdpa"
HEAD_DIM_STEP = 8


def aligned_attention(
    module: Any,
    query_BHLD: Tensor,
    key_BHLD: Tensor,
    value_BHLD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Bidirectional attention with the signature of ``transformers.AttentionInterface``: output ``[B, L, H, D]``."""
    head_dim = query_BHLD.shape[-1]
    padding = (0, -head_dim % HEAD_DIM_STEP)
    out_BHLD = F.scaled_dot_product_attention(
        F.pad(query_BHLD, padding),
        F.pad(key_BHLD, padding),
        F.pad(value_BHLD, padding),
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=head_dim**-0.5 if scaling is None else scaling,
    )
    return out_BHLD[..., :head_dim].transpose(1, 2).contiguous(), None


def align_vision_attention(tower: Any) -> Callable[[], None]:
    """Use ``aligned_attention`` in a ``SiglipVisionModel`` where it pays; returns the undo."""
    from transformers import AttentionInterface

    attention = tower.vision_model.encoder.layers[0].self_attn
    config = attention.config
    before = config._attn_implementation
    unaligned = attention.head_dim % HEAD_DIM_STEP != 0
    on_cpu = attention.q_proj.weight.device.type == "cpu"
    if not (unaligned and on_cpu and before == "sdpa"):
        return lambda: None
    AttentionInterface.register(ALIGNED_ATTENTION, aligned_attention)
    config._attn_implementation = ALIGNED_ATTENTION

    def undo() -> None:
        config._attn_implementation = before

    return undo


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like ``name``, or None."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def require_key(batch: Mapping[str, Any], key: str, reason: str) -> Any:
    """``batch[key]``.

    Raises:
        ValueError: the key is absent; the message has the reason it is needed, the keys that are there, and the
            nearest of them.
    """
    if key in batch:
        return batch[key]
    near = nearest(key, batch)
    hint = f" Did you mean {near!r}?" if near else ""
    raise ValueError(f"{reason} needs the batch key {key!r}; got {', '.join(sorted(batch))}.{hint}")
