# SPDX-License-Identifier: Apache-2.0
"""Which modules of a policy are quantized: chosen by their full path, listed one by one with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from embodix.contracts import ModuleKind
from embodix.policies.adapters import WRAPPED_LAYER
from embodix.policies.support import require_offered, support_of

CONVERTED: dict[ModuleKind, str] = {
    "language_linear": "linear layer of the language model's decoder",
    "embedding": "token embedding, asked for by embeddings=true",
    "unused_head": "language-model head that nothing reads, asked for by unused_heads=true",
}
SKIPPED: dict[ModuleKind, str] = {
    "embedding": "token embedding: in high precision unless embeddings=true",
    "unused_head": "language-model head that nothing reads: in high precision unless unused_heads=true",
    "vision": "vision tower: always in high precision",
    "connector": "connector of vision and language: always in high precision",
    "action_head": "action head: always in high precision",
    "other": "no part of the language model's decoder",
}


@dataclass(frozen=True)
class ModuleChoice:
    """What is done with one module.

    Attributes:
        path: its full path in the policy.
        kind: the part of the policy that it belongs to.
        shape: of its weight: outputs and inputs, or tokens and channels.
        convert: whether it is quantized.
        reason: why, or why not.
    """

    path: str
    kind: ModuleKind
    shape: tuple[int, int]
    convert: bool
    reason: str


def choose_modules(
    policy: nn.Module, policy_type: str, *, embeddings: bool = False, unused_heads: bool = False
) -> list[ModuleChoice]:
    """Every linear layer and embedding of the policy, in its order, with what is done with it.

    Args:
        embeddings: convert the language model's token embedding too.
        unused_heads: convert the language model's head too, which no policy reads.

    Raises:
        ValueError: a policy type whose language model is not known, or none of its layers where they are expected.
    """
    known = "Which modules may be quantized is known for"
    support = require_offered(policy_type, "module_kinds", known, "Set quantization=none and precision=none.")
    asked = {"language_linear": True, "embedding": embeddings, "unused_head": unused_heads}
    choices = [
        _choice(path, module, module_kind(path, policy_type), asked, support.kept_modules)
        for path, module in policy.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding))
    ]
    if not any(choice.kind == "language_linear" for choice in choices):
        found = choices[0].path if choices else "no linear layer at all"
        raise ValueError(
            f"The language model of a {policy_type} policy has layers that match "
            f"{support.module_kinds['language_linear']}; got none ({found}, ...). Pass LeRobot's bare policy, before "
            "DDP wraps it."
        )
    return choices


def module_kind(path: str, policy_type: str) -> ModuleKind:
    """The part of the policy that a module belongs to, by its full path; below an adapter it is what it was."""
    own_path = path.removesuffix(WRAPPED_LAYER)
    kinds = support_of(policy_type).module_kinds
    return next((kind for kind, pattern in kinds.items() if re.fullmatch(pattern, own_path)), "other")


def _choice(
    path: str, module: nn.Linear | nn.Embedding, kind: ModuleKind, asked: dict[str, bool], kept: Mapping[str, str]
) -> ModuleChoice:
    shape = (module.weight.shape[0], module.weight.shape[1])
    own_path = path.removesuffix(WRAPPED_LAYER)
    reason = next((reason for pattern, reason in kept.items() if re.fullmatch(pattern, own_path)), None)
    if reason is not None:
        return ModuleChoice(path, kind, shape, convert=False, reason=reason)
    convert = asked.get(kind, False)
    return ModuleChoice(path, kind, shape, convert, CONVERTED[kind] if convert else SKIPPED[kind])
