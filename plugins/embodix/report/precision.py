# SPDX-License-Identifier: Apache-2.0
"""What a run computed its matrix products in, as its manifest says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from embodix.report.runs import Run


def low_precision(run: Run) -> Mapping[str, Any] | None:
    """The description of the training precision; None for matrix products in the policy's own."""
    described = run.manifest.settings.get("precision")
    return described if isinstance(described, Mapping) else None


def precision_words(run: Run) -> str:
    """Kernel and extent: ``FP8: torchao rowwise, emulated (21 of 21 layers)``."""
    described = low_precision(run)
    if described is None:
        return "the policy's own"
    extent = f"{len(described.get('converted', []))} of {described.get('num_language_layers', '?')} layers"
    return f"FP8: {described.get('kernel', 'kernel not recorded')} ({extent})"
