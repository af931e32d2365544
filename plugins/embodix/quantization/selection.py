# SPDX-License-Identifier: Apache-2.0
"""Which modules of a policy are quantized: chosen by their full path, listed one by one with the reason.

Full paths, because names mislead: every name of π0.5 holds "expert" (``paligemma_with_expert``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from torch import nn

ModuleKind = Literal["language_linear", "embedding", "unused_head", "vision", "connector", "action_head", "other"]

_DECODER_LINEAR = r"layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
_WITH_EXPERT = r"model\.paligemma_with_expert\."
_EAGLE = r"_groot_model\.backbone\.eagle_model\."

# Policy type -> kind -> pattern of the full module path; the first that matches counts.
PATHS: dict[str, dict[ModuleKind, str]] = {
    "pi05": {
        "language_linear": rf"{_WITH_EXPERT}paligemma\.model\.language_model\.{_DECODER_LINEAR}",
        "embedding": rf"{_WITH_EXPERT}paligemma\.model\.language_model\.embed_tokens",
        "unused_head": rf"{_WITH_EXPERT}(paligemma|gemma_expert)\.lm_head",
        "vision": rf"{_WITH_EXPERT}paligemma\.model\.vision_tower\..+",
        "connector": rf"{_WITH_EXPERT}paligemma\.model\.multi_modal_projector\..+",
        "action_head": rf"{_WITH_EXPERT}gemma_expert\.model\..+|model\.(action_(in|out)_proj|time_mlp_(in|out))",
    },
    "groot": {
        "language_linear": rf"{_EAGLE}language_model\.model\.{_DECODER_LINEAR}",
        "embedding": rf"{_EAGLE}language_model\.model\.embed_tokens",
        "unused_head": rf"{_EAGLE}language_model\.lm_head",
        "vision": rf"{_EAGLE}vision_model\..+",
        "connector": rf"{_EAGLE}mlp1\..+|_groot_model\.backbone\.eagle_linear",
        "action_head": r"_groot_model\.action_head\..+",
    },
}
# The action expert stays in high precision, its unused head too.
_HEAD_OF_THE_EXPERT = ".gemma_expert."

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
SKIPPED_EXPERT_HEAD = "head that nothing reads, of the action expert: always in high precision"


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
    if policy_type not in PATHS:
        raise ValueError(
            f"Which modules may be quantized is known for {' and '.join(PATHS)}; got a policy of type {policy_type!r}. "
            "Set quantization=none and precision=none."
        )
    asked = {"language_linear": True, "embedding": embeddings, "unused_head": unused_heads}
    choices = [
        _choice(path, module, module_kind(path, policy_type), asked)
        for path, module in policy.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding))
    ]
    if not any(choice.kind == "language_linear" for choice in choices):
        found = choices[0].path if choices else "no linear layer at all"
        raise ValueError(
            f"The language model of a {policy_type} policy has layers that match "
            f"{PATHS[policy_type]['language_linear']}; got none ({found}, ...). Pass LeRobot's bare policy, before "
            "DDP or PEFT wrap it."
        )
    return choices


def module_kind(path: str, policy_type: str) -> ModuleKind:
    """The part of the policy that a module belongs to, by its full path."""
    return next((kind for kind, pattern in PATHS[policy_type].items() if re.fullmatch(pattern, path)), "other")


def _choice(path: str, module: nn.Linear | nn.Embedding, kind: ModuleKind, asked: dict[str, bool]) -> ModuleChoice:
    shape = (module.weight.shape[0], module.weight.shape[1])
    if kind == "unused_head" and _HEAD_OF_THE_EXPERT in path:
        return ModuleChoice(path, kind, shape, convert=False, reason=SKIPPED_EXPERT_HEAD)
    convert = asked.get(kind, False)
    return ModuleChoice(path, kind, shape, convert, CONVERTED[kind] if convert else SKIPPED[kind])
