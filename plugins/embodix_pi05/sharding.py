# SPDX-License-Identifier: Apache-2.0
"""What π0.5 is cut into where its parameters are sharded.

A joint layer computes a layer of the language model and one of the action expert in one function, and the last reads
no more than a part of the former: each pair is one unit.
"""

from __future__ import annotations

from typing import Any

from embodix.contracts import ShardUnit, TensorPlan

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


def tensor_plan(policy: Any) -> TensorPlan:
    """Query heads and feed-forwards cut; keys and values are one head, whose gathered output all query heads read.

    The vision tower's attention reads its width from its input, so that its projections are cut and gathered.
    """
    layers = [f"{stack}.layers.*" for stack in (_LANGUAGE, _EXPERT)]
    tower = f"{_VISION}.layers.*"
    paligemma, expert = f"{_WITH_EXPERT}.paligemma", f"{_WITH_EXPERT}.gemma_expert"
    config = policy.get_submodule(_LANGUAGE).config
    split = config.num_key_value_heads > 1
    keys_values = tuple(f"{layer}.self_attn.{kind}_proj" for layer in layers for kind in "kv")
    queries = tuple(
        f"{layer}.{part}" for layer in layers for part in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj")
    )
    outputs = tuple(f"{layer}.{part}" for layer in layers for part in ("self_attn.o_proj", "mlp.down_proj"))
    return TensorPlan(
        columns=(
            *queries,
            *(keys_values if split else ()),
            f"{tower}.mlp.fc1",
            f"{paligemma}.lm_head",
            f"{expert}.lm_head",
        ),
        rows=(*outputs, f"{tower}.mlp.fc2"),
        rows_of_whole=(f"{tower}.self_attn.out_proj",),
        gathered_columns=(
            *(f"{tower}.self_attn.{kind}_proj" for kind in "qkv"),
            f"{paligemma}.model.multi_modal_projector.linear",
            f"{_LANGUAGE}.embed_tokens",
            f"{_EXPERT}.*norm.dense",
            "model.time_mlp_*",
        ),
        shared_columns=() if split else keys_values,
        heads={} if split else {f"{layer}.self_attn": "num_key_value_groups" for layer in layers},
        counts={
            "query heads": config.num_attention_heads,
            **({"key/value heads": config.num_key_value_heads} if split else {}),
        },
    )


def unread_parameters(policy: Any) -> list[str]:
    """The heads, and of the language model what only its own output would need: in the last layer all behind keys and
    values but the query projection, whose gradient is zero, and the norm after it."""
    last = f"{_LANGUAGE}.layers.{len(policy.get_submodule(_LANGUAGE).layers) - 1}"
    unread = (f"{last}.self_attn.o_proj.", f"{last}.mlp.", f"{last}.post_attention_layernorm.", f"{_LANGUAGE}.norm.")
    heads = tuple(f"{_WITH_EXPERT}.{part}.lm_head." for part in ("paligemma", "gemma_expert"))
    return [name for name, _ in policy.named_parameters() if name.startswith((*unread, *heads))]
