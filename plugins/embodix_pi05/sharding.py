# SPDX-License-Identifier: Apache-2.0
"""What π0.5 is cut into where its parameters are sharded.

A joint layer computes a layer of the language model and one of the action expert in one function, and the last reads
no more than a part of the former: each pair is one unit.
"""

from __future__ import annotations

from typing import Any

from embodix.contracts import ShardUnit

_WITH_EXPERT = "model.paligemma_with_expert"
_LANGUAGE, _EXPERT = f"{_WITH_EXPERT}.paligemma.model.language_model", f"{_WITH_EXPERT}.gemma_expert.model"
_VISION = f"{_WITH_EXPERT}.paligemma.model.vision_tower.vision_model.encoder"


def shard_units(policy: Any) -> list[ShardUnit]:
    """Layers of the vision tower, the token embedding, joint layers, and the heads that nothing reads."""
    vision, language = policy.get_submodule(_VISION), policy.get_submodule(_LANGUAGE)
    tower = [f"{_VISION}.layers.{index}" for index in range(len(vision.layers))]
    joint = [(f"{_LANGUAGE}.layers.{i}", f"{_EXPERT}.layers.{i}") for i in range(len(language.layers))]
    heads = [f"{_WITH_EXPERT}.{part}.lm_head" for part in ("paligemma", "gemma_expert")]
    alone = [ShardUnit((path,), path) for path in (*tower, f"{_LANGUAGE}.embed_tokens", *heads)]
    return [*alone, *(ShardUnit(pair, pair[0]) for pair in joint)]


def unread_parameters(policy: Any) -> list[str]:
    """The heads, and of the language model what only its own output would need: in the last layer all behind keys and
    values but the query projection, whose gradient is zero, and the norm after it."""
    last = f"{_LANGUAGE}.layers.{len(policy.get_submodule(_LANGUAGE).layers) - 1}"
    unread = (f"{last}.self_attn.o_proj.", f"{last}.mlp.", f"{last}.post_attention_layernorm.", f"{_LANGUAGE}.norm.")
    heads = tuple(f"{_WITH_EXPERT}.{part}.lm_head." for part in ("paligemma", "gemma_expert"))
    return [name for name, _ in policy.named_parameters() if name.startswith((*unread, *heads))]
