# SPDX-License-Identifier: Apache-2.0
"""What GR00T-N1.5 is cut into where its parameters are sharded: every layer of its four stacks, and the embedding."""

from __future__ import annotations

from typing import Any

from torch import nn

from embodix.contracts import ShardUnit

_EAGLE, _HEAD = "_groot_model.backbone.eagle_model", "_groot_model.action_head"
_LANGUAGE = f"{_EAGLE}.language_model"
_STACKS = (
    f"{_EAGLE}.vision_model.vision_model.encoder.layers",
    f"{_LANGUAGE}.model.layers",
    f"{_HEAD}.vl_self_attention.transformer_blocks",
    f"{_HEAD}.model.transformer_blocks",
)


def shard_units(policy: Any) -> list[ShardUnit]:
    """One unit a layer; the token embedding and the head that nothing reads by themselves."""
    paths = [f"{stack}.{index}" for stack in _STACKS for index in range(_depth(policy, stack))]
    paths += [f"{_LANGUAGE}.model.embed_tokens", f"{_LANGUAGE}.lm_head"]
    return [ShardUnit((path,), path) for path in paths]


def _depth(policy: Any, stack: str) -> int:
    """Layers of a stack; none where the policy was built without it."""
    try:
        layers = policy.get_submodule(stack)
    except AttributeError:
        return 0
    return len(layers) if isinstance(layers, nn.ModuleList) else 0


def unread_parameters(policy: Any) -> list[str]:
    """The head of the language model."""
    return [name for name, _ in policy.named_parameters() if name.startswith(f"{_LANGUAGE}.lm_head.")]
