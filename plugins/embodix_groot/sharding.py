# SPDX-License-Identifier: Apache-2.0
"""What GR00T-N1.5 is cut into where its parameters are sharded: every layer of its four stacks, and the embedding."""

from __future__ import annotations

from typing import Any

from torch import nn

from embodix.contracts import ShardUnit, TensorPlan

_EAGLE, _HEAD = "_groot_model.backbone.eagle_model", "_groot_model.action_head"
_LANGUAGE = f"{_EAGLE}.language_model"
_STACKS = (
    f"{_EAGLE}.vision_model.vision_model.encoder.layers",
    f"{_LANGUAGE}.model.layers",
    f"{_HEAD}.vl_self_attention.transformer_blocks",
    f"{_HEAD}.model.transformer_blocks",
)

_OF_EMBODIMENT = ("state_encoder.layer*", "action_encoder.W*", "action_decoder.layer*")


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


def tensor_plan(policy: Any) -> TensorPlan:
    """Heads and feed-forwards of all stacks cut; a single key/value head is read by all query heads.

    The vision tower's attention reads its width from its input, so that its projections are cut and gathered. The
    weights of the query and key norms are those of all heads.
    """
    vision, language, *transformers = (f"{stack}.*" for stack in _STACKS if _depth(policy, stack))
    config = policy.get_submodule(_LANGUAGE).config
    split = config.num_key_value_heads > 1
    keys_values = (f"{language}.self_attn.k_proj", f"{language}.self_attn.v_proj")
    gated = tuple(f"{language}.{part}" for part in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj"))
    parts = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "ff.net.0.proj")
    return TensorPlan(
        columns=(
            *gated,
            *(keys_values if split else ()),
            *(f"{block}.{part}" for block in transformers for part in parts),
            f"{vision}.mlp.fc1",
            f"{_LANGUAGE}.lm_head",
        ),
        rows=(
            f"{language}.self_attn.o_proj",
            f"{language}.mlp.down_proj",
            *(f"{block}.{part}" for block in transformers for part in ("attn1.to_out.0", "ff.net.2")),
            f"{vision}.mlp.fc2",
        ),
        rows_of_whole=(f"{vision}.self_attn.out_proj",),
        gathered_columns=(
            *(f"{vision}.self_attn.{kind}_proj" for kind in "qkv"),
            f"{_LANGUAGE}.model.embed_tokens",
            f"{_HEAD}.model.transformer_blocks.*.norm1.linear",
            f"{_HEAD}.model.timestep_encoder.timestep_embedder.linear_*",
            f"{_HEAD}.model.proj_out_*",
            f"{_HEAD}.position_embedding",
        ),
        gathered_modules=tuple(f"{_HEAD}.{part}" for part in _OF_EMBODIMENT),
        shared_columns=() if split else keys_values,
        summed_parameters=(f"{language}.self_attn.[qk]_norm.weight",),
        heads={f"{block}.attn1": "heads" for block in transformers},
        counts={
            "query heads of the language model": config.num_attention_heads,
            **({"key/value heads of the language model": config.num_key_value_heads} if split else {}),
            **{
                f"heads of {block}": policy.get_submodule(block.replace("*", "0")).attn1.heads for block in transformers
            },
        },
    )


def unread_parameters(policy: Any) -> list[str]:
    """The head of the language model."""
    return [name for name, _ in policy.named_parameters() if name.startswith(f"{_LANGUAGE}.lm_head.")]
