# SPDX-License-Identifier: Apache-2.0
"""Registered quantizers, and which of them has written a model folder. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from embodix import plugins
from embodix.contracts import CheckpointQuantizer

KIND = "quantizers"
CONFIG_FILE = "config.json"
CONFIG_KEY = "quantization_config"


def checkpoint_quantizers() -> dict[str, CheckpointQuantizer]:
    """Quantizers with a file format by name, with their default options; those that can't be imported are left out."""
    found = {}
    for name in plugins.registry().names(KIND):
        try:
            quantizer = plugins.build(KIND, name, {})
        except plugins.PluginError:
            continue
        if isinstance(quantizer, CheckpointQuantizer):
            found[name] = quantizer
    return found


def quantizer_of(folder: Path) -> CheckpointQuantizer | None:
    """The quantizer that has written a model folder; None for a folder that is not quantized, or a model on the hub.

    Raises:
        ValueError: the folder's config says that it is quantized, and no registered quantizer knows it.
    """
    for quantizer in checkpoint_quantizers().values():
        if quantizer.recognises(folder):
            return quantizer
    fields = quantization_config(folder)
    if fields is None:
        return None
    *others, last = plugins.registry().names(KIND) or ["(none is installed)"]
    names = f"{', '.join(others)} and {last}" if others else last
    raise ValueError(
        f"{folder / CONFIG_FILE} says {CONFIG_KEY} {fields}, and none of the quantizers {names} knows it. Install the "
        "plugin that wrote it, or give the checkpoint that it was made from."
    )


def quantization_config(folder: Path) -> Any:
    """What the folder's config says of its weights; None where it says nothing."""
    config = folder / CONFIG_FILE
    return json.loads(config.read_text()).get(CONFIG_KEY) if config.is_file() else None
