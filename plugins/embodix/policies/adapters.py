# SPDX-License-Identifier: Apache-2.0
"""Adapters of PEFT around a policy: low-rank layers stand in the place of its linear ones, inside of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
WRAPPED_LAYER = ".base_layer"  # what PEFT appends to the path of a module that an adapter stands in for


def bare_policy(policy: Any) -> Any:
    """Upstream's policy without the model of PEFT around it; its adapted layers stay in force."""
    return policy.get_base_model() if is_adapted(policy) else policy


def is_adapted(policy: Any) -> bool:
    """Whether a model of PEFT is around the policy."""
    return hasattr(policy, "get_base_model")


def holds_adapters(folder: Path) -> bool:
    """Whether a model folder has adapters in the place of a policy's weights."""
    return (folder / ADAPTER_FILE).is_file()


def merge_command(model: Any) -> str:
    """The command that makes a plain policy of a model with adapters."""
    return f"lerobot merge {model} FOLDER"
