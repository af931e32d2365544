# SPDX-License-Identifier: Apache-2.0
"""What to say of overrides that Hydra could not compose: which one it was, and what is near it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import hydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embodix.cli.command_line import groups_with_options, parsable
from embodix.config.closed import did_you_mean
from embodix.config.compose import CONFIG_MODULE, compose, config_names

USER_MISTAKES = (HydraException, OmegaConfBaseException)


def hints_of(config_name: str, words: Sequence[str]) -> list[str]:
    """A sentence for each override that names nothing, or is added where it is to replace."""
    overrides = [override for override in parsable(words) if not override.key_or_group.startswith("hydra")]
    if misplaced := _misplaced(config_name, overrides):
        return misplaced
    groups = groups_with_options()
    config = _base_config(config_name, [override for override in overrides if _is_choice(override, groups)])
    if config is None:
        return []
    chosen, keys = dict(config.hydra.runtime.choices), _keys(config)
    hints = []
    for override in overrides:
        name = override.key_or_group
        if isinstance(override.value(), dict):
            hints += _mapping(config_name, override, groups.get(name))
        elif name in groups:
            hints += _plus(override, name in chosen, chosen.get(name))
        elif name not in keys and not override.is_add() and not override.is_force_add():
            hints.append(_unknown(config_name, name, keys, groups))
    return hints


def _misplaced(config_name: str, overrides: Sequence[Override]) -> list[str]:
    """For experiments of other commands."""
    hints = []
    for line in (str(override.input_line) for override in overrides if override.key_or_group == "experiment"):
        if _composes(config_name, line):
            continue
        if fitting := [name for name in config_names() if name != config_name and _composes(name, line)]:
            hints.append(f"{line} belongs to {', '.join(fitting)}; {config_name} can't have it.")
    return hints


def _composes(config_name: str, override: str) -> bool:
    try:
        compose(config_name, [override])
    except (*USER_MISTAKES, ValueError):
        return False
    return True


def _is_choice(override: Override, groups: dict[str, list[str]]) -> bool:
    """Whether it chooses another option, that exists, of a group that has one already."""
    value, replaces = override.value(), not (override.is_delete() or override.is_add() or override.is_force_add())
    return isinstance(value, str) and value in groups.get(override.key_or_group, []) and replaces


def _base_config(config_name: str, choices: Sequence[Override]) -> DictConfig | None:
    """The config with the options that can be chosen together, else without; None where not even that composes."""
    lines = [str(override.input_line) for override in choices]
    for overrides in ([line for line in lines if _composes(config_name, line)], []):
        try:
            with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
                return hydra.compose(config_name, overrides=overrides, return_hydra_config=True)
        except (*USER_MISTAKES, ValueError):
            continue
    return None


def _mapping(config_name: str, override: Override, options: list[str] | None) -> list[str]:
    """For a mapping that can't be merged into the node of a group."""
    if options is None or _composes(config_name, str(override.input_line)):
        return []
    group = override.key_or_group
    return [
        f"{group!r} is a group: choose one of its options ({', '.join(options)}), and set fields by their names, "
        f"{group}.<field>=...; got {override.input_line}."
    ]


def _plus(override: Override, is_chosen: bool, option: str | None) -> list[str]:
    group, value = override.key_or_group, str(override.input_line).partition("=")[2]
    if override.package is not None:
        return [f"{override.input_line}: give the group alone, {group}={value}."]
    if override.is_delete():
        return (
            [] if is_chosen else [f"{override.input_line}: no option of {group!r} is chosen, so none can be left out."]
        )
    if is_chosen and (override.is_add() or override.is_force_add()):
        return [f"{group!r} is chosen already ({group}={option}); leave out the plus: {group}={value}"]
    if not is_chosen and override.is_force_add():
        return [f"{group!r} is added with one plus: +{group}={value}"]
    if not is_chosen and not override.is_add():
        return [f"{group!r} is added with a plus: +{group}={value}"]
    return []


def _unknown(config_name: str, name: str, keys: list[str], groups: dict[str, list[str]]) -> str:
    known, parent = sorted({*keys, *groups}), name.rpartition(".")[0]
    hint = did_you_mean(name, known)
    if parent in groups and not difflib.get_close_matches(name, known):
        options = ", ".join(groups[parent])
        hint = f"choose an option of group {parent!r} that has it: {parent}=... ({options})."
    return f"{name!r} is neither a group nor a field of {config_name}; {hint}"


def _keys(config: DictConfig) -> list[str]:
    """Every field of the config, dotted."""
    keys: list[str] = []
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    _collect_keys({name: node for name, node in plain.items() if name != "hydra"}, "", keys)
    return keys


def _collect_keys(node: Any, prefix: str, keys: list[str]) -> None:
    if isinstance(node, dict):
        for key, value in node.items():
            keys.append(f"{prefix}{key}")
            _collect_keys(value, f"{prefix}{key}.", keys)
