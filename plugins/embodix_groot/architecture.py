# SPDX-License-Identifier: Apache-2.0
"""The sizes of a GR00T-N1.5, and upstream's two configs made from them; imports no torch.

Sources: lerobot/policies/groot/groot_n1.py, action_head/flow_matching_action_head.py and
eagle2_hg_model/configuration_eagle2_5_vl.py. What is not a size has the value of the public checkpoint's config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIELDS = {
    "vision": (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "image_size",
        "patch_size",
    ),
    "language": (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    ),
    "vl_self_attention": ("num_layers", "num_attention_heads", "attention_head_dim"),
    "action_head": (
        "num_layers",
        "num_attention_heads",
        "attention_head_dim",
        "hidden_size",
        "num_future_tokens",
        "num_embodiments",
        "num_inference_timesteps",
    ),
}
DROPOUT = "dropout"  # of both transformers of the action head, while training
GAIN = "linear_gain"  # optional: linear layers start with this / sqrt(inputs) as their standard deviation
MAX_ACTION_HORIZON = 16  # lerobot/policies/groot/processor_groot.py and configuration_groot.py have it as a literal
MAX_EMBODIMENT_ID = 31  # "new_embodiment" in lerobot/policies/groot/processor_groot.py

# Ids of the tokens that the Eagle processor needs, in the order in which `assets` puts them first in its vocabulary.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<IMG_CONTEXT>", "<img>", "</img>")
IMAGE_TOKEN = "<IMG_CONTEXT>"

# nvidia/GR00T-N1.5-3B: SigLIP2-so400m/14, Qwen3-1.7B cut to 12 layers, DiT of 16 layers.
PUBLIC_ARCHITECTURE: dict[str, Any] = {
    "vision": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
    },
    "language": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151680,
    },
    "vl_self_attention": {"num_layers": 4, "num_attention_heads": 32, "attention_head_dim": 64},
    "action_head": {
        "num_layers": 16,
        "num_attention_heads": 32,
        "attention_head_dim": 48,
        "hidden_size": 1024,
        "num_future_tokens": 32,
        "num_embodiments": 32,
        "num_inference_timesteps": 4,
    },
    DROPOUT: 0.2,
}


def tokens_per_image(architecture: Mapping[str, Any]) -> int:
    """Language-model tokens of one image: one for each patch."""
    vision = architecture["vision"]
    return int(vision["image_size"] // vision["patch_size"]) ** 2


def validate_architecture(architecture: Mapping[str, Any]) -> None:
    """Refuse sizes that upstream's code can't compute with.

    Raises:
        ValueError: a part or field that is missing or unknown, a size below 1, or parts that do not fit together.
    """
    required = {name: value for name, value in architecture.items() if name != GAIN}
    _require_names("architecture", required, (*FIELDS, DROPOUT))
    dropout, gain = architecture[DROPOUT], architecture.get(GAIN)
    if not _is_number(dropout) or not 0 <= dropout < 1:
        raise ValueError(f"architecture.{DROPOUT} is a number from 0 to below 1; got {dropout!r}.")
    if gain is not None and (not _is_number(gain) or gain <= 0):
        raise ValueError(f"architecture.{GAIN} is a number above 0, or null for upstream's 0.02; got {gain!r}.")
    for part, fields in FIELDS.items():
        _require_names(f"architecture.{part}", architecture[part], fields)
        for field in fields:
            size = architecture[part][field]
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"architecture.{part}.{field} is a whole number, 1 at least; got {size!r}.")
    _require_fitting_parts(*(architecture[part] for part in FIELDS))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_fitting_parts(
    vision: Mapping[str, int], language: Mapping[str, int], vl: Mapping[str, int], head: Mapping[str, int]
) -> None:
    rules = [
        (
            vision["hidden_size"] % vision["num_attention_heads"] == 0,
            "vision.hidden_size must be a multiple of vision.num_attention_heads; got "
            f"{vision['hidden_size']} and {vision['num_attention_heads']}.",
        ),
        (
            vision["image_size"] % vision["patch_size"] == 0,
            "vision.image_size must be a multiple of vision.patch_size, one token a patch; got "
            f"{vision['image_size']} and {vision['patch_size']}.",
        ),
        (
            language["num_attention_heads"] % language["num_key_value_heads"] == 0,
            "language.num_attention_heads must be a multiple of language.num_key_value_heads; got "
            f"{language['num_attention_heads']} and {language['num_key_value_heads']}.",
        ),
        (language["head_dim"] % 2 == 0, f"language.head_dim is split in halves by RoPE; got {language['head_dim']}."),
        (
            language["vocab_size"] > len(SPECIAL_TOKENS),
            f"language.vocab_size holds {len(SPECIAL_TOKENS)} special tokens and more; got {language['vocab_size']}.",
        ),
        (
            vl["num_attention_heads"] * vl["attention_head_dim"] == language["hidden_size"],
            "vl_self_attention works in the language model's width, so num_attention_heads x attention_head_dim must "
            f"be language.hidden_size; got {vl['num_attention_heads']} x {vl['attention_head_dim']} and "
            f"{language['hidden_size']}.",
        ),
        (
            head["num_attention_heads"] * head["attention_head_dim"] % 2 == 0,
            "action_head.num_attention_heads x attention_head_dim is split in halves by the time encoding; got "
            f"{head['num_attention_heads']} x {head['attention_head_dim']}.",
        ),
        (
            head["num_embodiments"] > MAX_EMBODIMENT_ID,
            f"action_head.num_embodiments must exceed {MAX_EMBODIMENT_ID}, upstream's id of 'new_embodiment'; got "
            f"{head['num_embodiments']}.",
        ),
    ]
    for holds, message in rules:
        if not holds:
            raise ValueError(message)


def _require_names(where: str, given: Any, wanted: tuple[str, ...]) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} is a mapping with {', '.join(wanted)}; got {given!r}.")
    missing = [name for name in wanted if name not in given]
    unknown = [name for name in given if name not in wanted]
    if missing or unknown:
        raise ValueError(
            f"{where} has exactly {', '.join(wanted)}; missing: {', '.join(missing) or 'none'}, "
            f"unknown: {', '.join(unknown) or 'none'}."
        )


def eagle_config(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of upstream's ``Eagle25VLConfig``, which is also the assets' ``config.json``."""
    vision, language = dict(architecture["vision"]), dict(architecture["language"])
    endoftext, _, im_end, *_ = SPECIAL_TOKENS
    return {
        "architectures": ["Eagle25VLForConditionalGeneration"],
        "model_type": "eagle_2_5_vl",
        "vision_config": {**vision, "model_type": "siglip_vision_model"},
        "text_config": {
            **language,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "layer_types": ["full_attention"] * language["num_hidden_layers"],
            "bos_token_id": SPECIAL_TOKENS.index(endoftext),
            "eos_token_id": SPECIAL_TOKENS.index(im_end),
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000},
            "tie_word_embeddings": False,
        },
        "_attn_implementation": "sdpa",
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": vision["image_size"],
        "image_token_index": SPECIAL_TOKENS.index(IMAGE_TOKEN),
        "loss_version": "efficient_v2_cp_head",
        "max_dynamic_tiles": 12,
        "min_dynamic_tiles": 1,
        "mlp_connector_layers": 1,
        "pad2square": False,
        "select_layer": -1,
        "template": "qwen2-chat",
        # Loading a base model unties them in any case (transformers stops at the backbone, which is no
        # PreTrainedModel), and plain upstream can only load a checkpoint that holds both tensors.
        "tie_word_embeddings": False,
        "use_pixel_shuffle": False,
        "use_thumbnail": True,
    }


def groot_config(
    architecture: Mapping[str, Any], *, max_state_dim: int, max_action_dim: int, chunk_size: int, assets: str
) -> dict[str, Any]:
    """Keyword arguments of upstream's ``GR00TN15Config``, which is also a base model's ``config.json``.

    Args:
        architecture: valid sizes.
        max_state_dim, max_action_dim, chunk_size: those of the ``GrootConfig``, as its processor pads to them.
        assets: absolute path of the folder with the Eagle config and processor.
    """
    width = architecture["language"]["hidden_size"]
    horizon = min(chunk_size, MAX_ACTION_HORIZON)
    return {
        "action_dim": max_action_dim,
        "action_horizon": horizon,
        "action_head_cfg": _action_head_config(architecture, max_state_dim, max_action_dim, horizon),
        "backbone_cfg": {
            "project_to_dim": None,
            "reproject_vision": False,
            "select_layer": architecture["language"]["num_hidden_layers"],
            "tokenizer_assets_repo": assets,
            "tune_llm": False,
            "tune_visual": True,
            "use_flash_attention": False,
        },
        "compute_dtype": "float32",
        "hidden_size": width,
    }


def _action_head_config(
    architecture: Mapping[str, Any], max_state_dim: int, max_action_dim: int, horizon: int
) -> dict[str, Any]:
    head, vl_self_attention = architecture["action_head"], architecture["vl_self_attention"]
    width = architecture["language"]["hidden_size"]
    transformer = {"dropout": architecture[DROPOUT], "final_dropout": True, "positional_embeddings": None}
    return {
        "action_dim": max_action_dim,
        "action_horizon": horizon,
        "add_pos_embed": True,
        "backbone_embedding_dim": width,
        "diffusion_model_cfg": {
            **transformer,
            "attention_head_dim": head["attention_head_dim"],
            "cross_attention_dim": width,
            "interleave_self_attention": True,
            "norm_type": "ada_norm",
            "num_attention_heads": head["num_attention_heads"],
            "num_layers": head["num_layers"],
            "output_dim": head["hidden_size"],
        },
        "hidden_size": head["hidden_size"],
        "input_embedding_dim": head["num_attention_heads"] * head["attention_head_dim"],
        "max_action_dim": max_action_dim,
        "max_num_embodiments": head["num_embodiments"],
        "max_state_dim": max_state_dim,
        "model_dtype": "float32",
        "noise_beta_alpha": 1.5,
        "noise_beta_beta": 1.0,
        "noise_s": 0.999,
        "num_inference_timesteps": head["num_inference_timesteps"],
        "num_target_vision_tokens": head["num_future_tokens"],
        "num_timestep_buckets": 1000,
        "tune_diffusion_model": True,
        "tune_projector": True,
        "use_vlln": True,
        "vl_self_attention_cfg": {**transformer, **vl_self_attention},
    }
