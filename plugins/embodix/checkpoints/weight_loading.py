# SPDX-License-Identifier: Apache-2.0
"""What is said when a checkpoint does not give a policy its weights; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MAX_NAMES = 12


class WeightLoadError(ValueError):
    """A checkpoint did not give every tensor of the policy its value."""


def listed(parts: Mapping[str, Sequence[str]]) -> str:
    """A paragraph for each title with its tensors, the first ``MAX_NAMES`` by name."""
    return "\n".join(_paragraph(title, names) for title, names in parts.items())


def _paragraph(title: str, names: Sequence[str]) -> str:
    shown = [f"    {name}" for name in names[:MAX_NAMES]]
    if len(names) > MAX_NAMES:
        shown.append(f"    ... and {len(names) - MAX_NAMES} more")
    return "\n".join([f"  {title} ({len(names)}):", *shown])
