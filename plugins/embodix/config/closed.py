# SPDX-License-Identifier: Apache-2.0
"""Closes a composed config: a key that no schema knows is an error, however it was added.

Hydra opens dataclasses, too, for what ``+`` adds, so their keys are compared with their fields after composing.
Mappings that are upstream's own are open here; upstream's decoder checks their keys.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

from omegaconf import DictConfig, OmegaConf

HYDRAS_OWN_GROUP = "hydra.env"  # Hydra's config has it, Hydra's dataclass does not
TARGET = "_target_"


class UnknownKeyError(ValueError):
    """A key that no schema of the command knows."""


def require_known_keys(config: DictConfig, config_name: str) -> None:
    """Compare every node that a dataclass describes with the fields of that dataclass.

    Args:
        config: as composed; nodes without a dataclass are open.
        config_name: for the message.

    Raises:
        UnknownKeyError: keys that are no field, each with the nearest that is one.
    """
    if unknown := list(_unknown_keys(config, "")):
        known = list(_known_keys(config, ""))
        raise UnknownKeyError("\n".join(_message(key, known, config_name) for key in unknown))


def require_known_hydra_keys(hydra_config: DictConfig) -> None:
    """The same for the node ``hydra``.

    Raises:
        UnknownKeyError: keys that Hydra's own dataclasses have no field for.
    """
    unknown = [key for key in _unknown_keys(hydra_config, "hydra.") if key != HYDRAS_OWN_GROUP]
    known = list(_known_keys(hydra_config, "hydra."))
    if unknown:
        raise UnknownKeyError("\n".join(f"{key!r} is no field of Hydra; {did_you_mean(key, known)}" for key in unknown))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest of the known names as a question, or where they are listed."""
    others = [other for other in known if not name.startswith(f"{other}.")]
    nearest = difflib.get_close_matches(name, others, n=3)
    return f"did you mean {' or '.join(nearest)}?" if nearest else "nothing is near it; --cfg job lists all."


def _message(key: str, known: list[str], config_name: str) -> str:
    if "/" in key:
        return f"Config key {key!r} is a group that did not land; is its YAML on Hydra's search path?"
    return f"{key!r} is neither a group nor a field of {config_name}; {did_you_mean(key, known)}"


def _unknown_keys(node: DictConfig, prefix: str) -> Iterator[str]:
    fields = _fields_of(node)
    for key, child in _items(node):
        if fields is not None and key not in fields:
            yield f"{prefix}{key}"
        elif _has_keys(child):
            yield from _unknown_keys(child, f"{prefix}{key}.")


def _known_keys(node: DictConfig, prefix: str) -> Iterator[str]:
    fields = _fields_of(node)
    for key, child in _items(node):
        if fields is None or key in fields:
            yield f"{prefix}{key}"
            if _has_keys(child):
                yield from _known_keys(child, f"{prefix}{key}.")


def _items(node: DictConfig) -> Iterator[tuple[str, Any]]:
    return ((str(key), child) for key, child in node.items_ex(resolve=False))


def _fields_of(node: DictConfig) -> set[str] | None:
    """None where the node is open: a dataclass of a target alone leaves its arguments to what is built."""
    described_by = OmegaConf.get_type(node)
    if not dataclasses.is_dataclass(described_by):
        return None
    names = {field.name for field in dataclasses.fields(described_by)}
    return None if names == {TARGET} else names


def _has_keys(node: object) -> TypeGuard[DictConfig]:
    """Whether it is a mapping that is given here: one that is null, missing or given elsewhere has the length 0."""
    return isinstance(node, DictConfig) and len(node) > 0
