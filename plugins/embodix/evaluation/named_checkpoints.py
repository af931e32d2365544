# SPDX-License-Identifier: Apache-2.0
"""The checkpoints that a command names: one, a list, or a mapping with the names for the report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Folders that every run has: they tell nothing apart.
GENERIC = re.compile(r"pretrained_model|checkpoints|last|run|variants|embodiments|outputs|train|\d{6}")
NAME = re.compile(r"[\w.+-]+")


def name_checkpoints(value: Any) -> dict[str, str]:
    """Name -> path; empty for None.

    Raises:
        ValueError: not a path, list or mapping of paths, one twice, or a name that can't be a folder's.
    """
    if value is None:
        return {}
    if isinstance(value, str | Path):
        return {_name(str(value), 1): str(value)}
    if isinstance(value, Mapping):
        named = {str(name): path for name, path in value.items()}
    elif isinstance(value, Sequence):
        named = dict(zip(_different_names([str(path) for path in value]), value, strict=True))
    else:
        named = {"": value}
    for name, path in named.items():
        if not isinstance(path, str | Path) or not NAME.fullmatch(name):
            raise ValueError(
                "checkpoint is a path, a list of paths, or names with paths ('checkpoint={upstream: a, embodix: b}'), "
                f"a name being letters, digits, dots, dashes and underscores; got {name!r}: {path!r}."
            )
    return {name: str(path) for name, path in named.items()}


def _different_names(paths: Sequence[str]) -> list[str]:
    """As many of the last telling folders of each path as make them different."""
    for num_parts in range(1, 1 + max((len(Path(path).parts) for path in paths), default=0)):
        names = [_name(path, num_parts) for path in paths]
        if len(set(names)) == len(paths):
            return names
    steps = [".".join(Path(path).parts[-3:]) for path in paths]  # checkpoints of one run
    names = [re.sub(r"[^\w.+-]", "_", step) for step in steps]
    if len(set(names)) < len(paths) or not paths:
        raise ValueError(f"checkpoint needs one or more different paths; got {list(paths)}.")
    return names


def _name(path: str, num_parts: int) -> str:
    parts = [part for part in Path(path).parts if part != "/"]
    telling = [part for part in parts if not GENERIC.fullmatch(part)] or parts
    return re.sub(r"[^\w.+-]", "_", "_".join(telling[-num_parts:])) or "policy"
