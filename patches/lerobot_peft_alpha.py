# SPDX-License-Identifier: Apache-2.0
"""Scale LoRA's adapters as asked: upstream's config has their rank and not what it is divided into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embodix.patching import Patch, replace_attribute

PATCH = Patch(
    name="lerobot_peft_alpha",
    target="lerobot.policies.pretrained.PreTrainedPolicy.wrap_with_peft",
    requires={"lerobot": ">=0.5.1,<0.5.2"},
    symptom="lora_alpha is peft's own, 8, at every rank: adapters of rank 64 come in at an eighth of their output.",
    upstream="none found; upstream's PeftConfig lacks the field (lerobot/configs/default.py)",
    why_safe="applied where peft.lora_alpha is set only; the value goes through upstream's own overrides to peft.",
    remove_when="upstream's PeftConfig has lora_alpha",
)


def apply(*, lora_alpha: int) -> Callable[[], None]:
    """Patch upstream's method; returns the undo.

    Args:
        lora_alpha: the output of adapters of rank r is multiplied by lora_alpha / r.
    """
    from lerobot.policies.pretrained import PreTrainedPolicy

    wrap = PreTrainedPolicy.wrap_with_peft

    def wrap_with_alpha(self: Any, peft_config: Any = None, peft_cli_overrides: dict[str, Any] | None = None) -> Any:
        return wrap(self, peft_config, {**(peft_cli_overrides or {}), "lora_alpha": lora_alpha})

    return replace_attribute(PreTrainedPolicy, "wrap_with_peft", wrap_with_alpha)
