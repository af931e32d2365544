# SPDX-License-Identifier: Apache-2.0
"""Build π0.5 in other sizes than the two that upstream knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="lerobot_pi05_sizes",
    target="lerobot.policies.pi05.modeling_pi05: get_gemma_config, PaliGemmaForConditionalGenerationWithPiGemma, "
    "PiGemmaForCausalLM",
    requires={"lerobot": ">=0.5.1,<0.5.2"},
    symptom="PI05Config takes gemma_300m and gemma_2b only; 27 vision layers and 257152 token ids are literals, so "
    "no π0.5 fits a CPU.",
    upstream="no thread: a small π0.5 is not something upstream set out to offer",
    why_safe="only sizes change; every module, name and formula stays upstream's",
    remove_when="PI05Config accepts widths, depths, vision layers and a vocabulary",
)

FIELDS = {
    "vision": ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size"),
    "language": ("width", "depth", "mlp_dim", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
    "action_expert": ("width", "depth", "mlp_dim", "num_heads", "num_kv_heads", "head_dim"),
}


GATE = "expert_gate"  # optional: initial gate of the action expert's adaptive norms


def validate_architecture(architecture: Mapping[str, Any]) -> None:
    """Refuse sizes that upstream's code can't compute with.

    Raises:
        ValueError: a part or field that is missing or unknown, a size below 1, or parts that do not fit together.
    """
    _require_names("architecture", {k: v for k, v in architecture.items() if k != GATE}, tuple(FIELDS))
    gate = architecture.get(GATE)
    if gate is not None and (isinstance(gate, bool) or not isinstance(gate, (int, float))):
        raise ValueError(f"architecture.{GATE} is a number, or null for upstream's own initialisation; got {gate!r}.")
    for part, fields in FIELDS.items():
        _require_names(f"architecture.{part}", architecture[part], fields)
        for field in fields:
            size = architecture[part][field]
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"architecture.{part}.{field} is a whole number, 1 at least; got {size!r}.")
    language, expert, vision = (architecture[part] for part in ("language", "action_expert", "vision"))
    for field in ("depth", "num_heads", "num_kv_heads", "head_dim"):
        if language[field] != expert[field]:
            raise ValueError(
                f"Language model and action expert share one attention a layer, so {field} must be equal; got "
                f"language {language[field]} and action_expert {expert[field]}."
            )
    if language["num_heads"] != 8:
        raise ValueError(f"Upstream's layer has 8 heads as a literal; got num_heads {language['num_heads']}.")
    if 8 % language["num_kv_heads"]:
        raise ValueError(f"num_kv_heads must divide the 8 heads; got {language['num_kv_heads']}.")
    if language["head_dim"] % 2 or expert["width"] % 2:
        raise ValueError(
            "head_dim (RoPE) and action_expert.width (time embedding) are split in halves, so both must be even; "
            f"got {language['head_dim']} and {expert['width']}."
        )
    if vision["hidden_size"] % vision["num_attention_heads"]:
        raise ValueError(
            "vision.hidden_size must be a multiple of vision.num_attention_heads; got "
            f"{vision['hidden_size']} and {vision['num_attention_heads']}."
        )


def _require_names(where: str, given: Mapping[str, Any], wanted: tuple[str, ...]) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} is a mapping with {', '.join(wanted)}; got {given!r}.")
    missing = [name for name in wanted if name not in given]
    unknown = [name for name in given if name not in wanted]
    if missing or unknown:
        raise ValueError(
            f"{where} has exactly {', '.join(wanted)}; missing: {', '.join(missing) or 'none'}, "
            f"unknown: {', '.join(unknown) or 'none'}."
        )


def apply(*, architecture: Mapping[str, Any]) -> Callable[[], None]:
    """Make upstream's ``PI05Policy`` build in these sizes; returns the undo.

    Args:
        architecture: ``vision``, ``language`` and ``action_expert`` with their sizes, and optionally ``expert_gate``,
            with which the adaptive norms of the action expert start: scale 0, shift 0 and this gate, instead of
            small random values. A model trained from scratch then begins as a plain residual network.

    Raises:
        ValueError: see ``validate_architecture``.
    """
    validate_architecture(architecture)
    from lerobot.policies.pi05 import modeling_pi05

    language, expert, vision = (dict(architecture[part]) for part in ("language", "action_expert", "vision"))
    vocab_size = language.pop("vocab_size")
    sizes = {"gemma_2b": language, "gemma_300m": expert}
    build_vlm = modeling_pi05.PaliGemmaForConditionalGenerationWithPiGemma
    build_expert = modeling_pi05.PiGemmaForCausalLM

    def get_gemma_config(variant: str) -> Any:
        return modeling_pi05.GemmaConfig(**sizes[variant])

    # Upstream passes `config=` by keyword, so the parameter must be called that.
    def build_sized_vlm(config: Any) -> Any:
        for field, size in vision.items():
            setattr(config.vision_config, field, size)
        config.vision_config.projection_dim = language["width"]
        config.text_config.vocab_size = config._vocab_size = config.image_token_index = vocab_size
        return build_vlm(config=config)

    def build_sized_expert(config: Any) -> Any:
        config.vocab_size = vocab_size
        built = build_expert(config=config)
        if architecture.get(GATE) is not None:
            _start_gates(built, float(architecture[GATE]))
        return built

    undo = [
        replace_attribute(modeling_pi05, "get_gemma_config", get_gemma_config),
        replace_attribute(modeling_pi05, "PaliGemmaForConditionalGenerationWithPiGemma", build_sized_vlm),
        replace_attribute(modeling_pi05, "PiGemmaForCausalLM", build_sized_expert),
    ]

    def undo_all() -> None:
        for restore in reversed(undo):
            restore()

    return undo_all


def _start_gates(expert: Any, gate: float) -> None:
    """Set every adaptive norm's output to scale 0, shift 0 and ``gate``, whatever the time condition."""
    import torch
    from lerobot.policies.pi_gemma import PiGemmaRMSNorm

    for module in expert.modules():
        if isinstance(module, PiGemmaRMSNorm) and module.dense is not None:
            with torch.no_grad():
                module.dense.bias.zero_()[2 * module.dim :] = gate
