# SPDX-License-Identifier: Apache-2.0
"""Sizes and parameter counts of π0.5 as upstream builds it, from the policy's config alone.

Upstream hard-codes the vision tower and the vocabulary, and knows two sizes of the transformers
(lerobot/policies/pi05/modeling_pi05.py, ``get_gemma_config`` and ``PaliGemmaWithExpertModel``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VOCAB_SIZE = 257_152


@dataclass(frozen=True)
class VisionSize:
    """The SigLIP vision tower."""

    width: int = 1152
    mlp_dim: int = 4304
    depth: int = 27
    num_heads: int = 16
    patch_size: int = 14


@dataclass(frozen=True)
class TransformerSize:
    """The Gemma language model or the action expert."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.num_kv_heads * self.head_dim


VARIANTS = {
    "gemma_300m": TransformerSize(1024, 18, 4096, 8, 1, 256),
    "gemma_2b": TransformerSize(2048, 18, 16_384, 8, 1, 256),
}


@dataclass(frozen=True)
class Pi05Sizes:
    """Everything that decides what a sample costs."""

    vision: VisionSize
    language: TransformerSize
    expert: TransformerSize
    vocab_size: int
    image_size: int
    prompt_length: int
    chunk_size: int
    action_dim: int
    freeze_vision: bool = False
    expert_only: bool = False

    @property
    def patches(self) -> int:
        """Tokens that one image becomes."""
        return (self.image_size // self.vision.patch_size) ** 2


def sizes_of(policy: Mapping[str, Any], architecture: Mapping[str, Any] | None = None) -> Pi05Sizes:
    """Read the sizes from upstream's config fields, or from an ``architecture`` where one is given.

    Args:
        policy: ``policy`` node of the train config; fields that are missing take upstream's defaults.
        architecture: options of the patch ``lerobot_pi05_sizes``; None for the sizes upstream knows.

    Raises:
        ValueError: another policy type, or a variant that upstream does not know.
    """
    if policy.get("type", "pi05") != "pi05":
        raise ValueError(f"The cost of a step is modelled for policy.type=pi05; got {policy['type']!r}.")
    if architecture is None:
        vision, vocab_size = VisionSize(), VOCAB_SIZE
        language = _variant(policy, "paligemma_variant", "gemma_2b")
        expert = _variant(policy, "action_expert_variant", "gemma_300m")
    else:
        parts = {part: dict(architecture[part]) for part in ("vision", "language", "action_expert")}
        vocab_size = parts["language"].pop("vocab_size")
        vision = VisionSize(
            width=parts["vision"]["hidden_size"],
            mlp_dim=parts["vision"]["intermediate_size"],
            depth=parts["vision"]["num_hidden_layers"],
            num_heads=parts["vision"]["num_attention_heads"],
            patch_size=parts["vision"]["patch_size"],
        )
        language, expert = TransformerSize(**parts["language"]), TransformerSize(**parts["action_expert"])
    return Pi05Sizes(
        vision=vision,
        language=language,
        expert=expert,
        vocab_size=vocab_size,
        image_size=int(policy.get("image_resolution", (224, 224))[0]),
        prompt_length=int(policy.get("tokenizer_max_length", 200)),
        chunk_size=int(policy.get("chunk_size", 50)),
        action_dim=int(policy.get("max_action_dim", 32)),
        freeze_vision=bool(policy.get("freeze_vision_encoder", False)),
        expert_only=bool(policy.get("train_expert_only", False)),
    )


def _variant(policy: Mapping[str, Any], field: str, default: str) -> TransformerSize:
    name = policy.get(field, default)
    if name not in VARIANTS:
        raise ValueError(f"policy.{field} is one of {', '.join(VARIANTS)}; got {name!r}.")
    return VARIANTS[name]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share their treatment.

    Attributes:
        trained: they get a gradient, so the optimizer keeps state for them.
        float32: upstream keeps them in float32 when the policy's dtype is bfloat16.
    """

    name: str
    count: int
    trained: bool
    float32: bool


def parameter_groups(sizes: Pi05Sizes) -> list[ParameterGroup]:
    """Every parameter of the policy as built, output heads that nothing uses included."""
    language, expert, vision = sizes.language, sizes.expert, sizes.vision
    prefix_trained = not sizes.expert_only
    vision_trained = prefix_trained and not sizes.freeze_vision
    tower = _vision_parameters(vision, sizes.patches)
    linears, norms = layer_linears(language), 2 * language.width
    # Nothing reads the prefix after the last layer's keys and values (its query projection gets zeros, not None).
    dead = language.query_width * language.width + 3 * language.width * language.mlp_dim
    ada_norm = 3 * expert.width * (expert.width + 1)
    heads = expert.width * (2 * sizes.action_dim + 1) + sizes.action_dim + 2 * expert.width * (expert.width + 1)
    return [
        ParameterGroup("vision tower", tower, vision_trained, True),
        ParameterGroup("image projector", (vision.width + 1) * language.width, prefix_trained, True),
        ParameterGroup("token embedding", sizes.vocab_size * language.width, prefix_trained, False),
        ParameterGroup("language layers", language.depth * linears - dead, prefix_trained, False),
        ParameterGroup("language norms", (2 * language.depth - 1) * language.width, prefix_trained, True),
        ParameterGroup("unused end of the last language layer", dead, False, False),
        ParameterGroup("unused norms of the last language layer", norms, False, True),
        ParameterGroup("unused language output head", sizes.vocab_size * language.width, False, False),
        ParameterGroup("action expert layers", expert.depth * layer_linears(expert), True, False),
        ParameterGroup("action expert norms", (2 * expert.depth + 1) * ada_norm, True, True),
        ParameterGroup("unused expert output head", sizes.vocab_size * expert.width, False, False),
        ParameterGroup("action and time projections", heads, True, True),
    ]


def layer_linears(size: TransformerSize) -> int:
    """Weights of one layer's linear maps: q, k, v, o, gate, up, down."""
    return size.width * (2 * size.query_width + 2 * size.key_width + 3 * size.mlp_dim)


def num_parameters(sizes: Pi05Sizes) -> int:
    """Parameters of the policy as built."""
    return sum(group.count for group in parameter_groups(sizes))


def _vision_parameters(vision: VisionSize, patches: int) -> int:
    embedding = (3 * vision.patch_size**2 + 1 + patches) * vision.width
    attention = 4 * vision.width * (vision.width + 1)
    mlp = 2 * vision.width * vision.mlp_dim + vision.width + vision.mlp_dim
    return embedding + vision.depth * (attention + mlp + 4 * vision.width) + 2 * vision.width
