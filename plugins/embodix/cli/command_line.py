# SPDX-License-Identifier: Apache-2.0
"""What the words of a command line say, read before Hydra composes anything.

Hydra's grammar says where it stopped, not in which word; and a group of the defaults list that is optional is passed
over where its option does not exist. Here each word is read by itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException

from embodix.config.closed import did_you_mean
from embodix.config.compose import CONFIG_MODULE

QUOTING = "Quote twice what has spaces, braces, commas or = in it: \"key='a value'\"."


class CommandLineError(ValueError):
    """Words that are no overrides, or options of groups that do not exist."""


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides among the words, and the flags that Hydra does not have; its own flags are left out.

    Exits as Hydra does where one of its flags lacks its value.
    """
    known, others = get_args_parser().parse_known_args(list(argv))
    words = [*known.overrides, *others]
    flags = [word for word in words if word.startswith("-") and word != "-"]
    return [word for word in words if word not in flags], flags


def adds_search_path(argv: Sequence[str]) -> bool:
    """Whether folders of the user's own are searched for groups and options, too."""
    known, _ = get_args_parser().parse_known_args(list(argv))
    named = any(word.lstrip("+").startswith("hydra.searchpath") for word in known.overrides)
    return named or known.config_dir is not None or known.config_path is not None


def require_readable(words: Sequence[str], *, knows_options: bool = True) -> list[Override]:
    """The overrides that the words are.

    Args:
        knows_options: whether the options of groups are those of the packages alone.

    Raises:
        CommandLineError: words that Hydra's grammar can't read, each with what is wrong, or options that do not exist.
    """
    read, faults = [], []
    for word in words:
        try:
            read += OverridesParser.create().parse_overrides([word])
        except HydraException as error:
            faults.append(_unreadable(word, error))
    groups = groups_with_options() if read and knows_options else {}
    faults += [fault for override in read for fault in _group_faults(override, groups)]
    if faults:
        raise CommandLineError("\n".join(faults))
    return read


def parsable(words: Sequence[str]) -> list[Override]:
    """Those that follow Hydra's grammar."""
    found = []
    for word in words:
        try:
            found += OverridesParser.create().parse_overrides([word])
        except HydraException:
            continue
    return found


def groups_with_options() -> dict[str, list[str]]:
    """Every config group with its options, Hydra's own left out."""
    if GlobalHydra.instance().is_initialized():
        return _groups()
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        return _groups()


def _groups() -> dict[str, list[str]]:
    loader = GlobalHydra.instance().config_loader()
    return {group: loader.get_group_options(group) for group in loader.list_groups("") if group != "hydra"}


def _unreadable(word: str, error: HydraException) -> str:
    """Why a word is no override, in words; Hydra's own message follows where nothing better is known."""
    key, equals, value = word.partition("=")
    if not word.strip():
        return f"{word!r} is an empty word; an override reads key=value."
    if not equals:
        return f"{word!r} is no override, which reads key=value ({key}=...)."
    if not key.strip("+~"):
        return f"{word!r} has no key; an override reads key=value."
    for opening, closing in (("[", "]"), ("{", "}"), ("(", ")")):
        if value.count(opening) != value.count(closing):
            return f"{word!r} has {opening} and {closing} in unequal numbers. {QUOTING}"
    return f"{word!r} can't be read: {str(error).splitlines()[0]}. {QUOTING}"


def _group_faults(override: Override, groups: Mapping[str, Sequence[str]]) -> Iterator[str]:
    name, group = str(override.input_line), override.key_or_group
    if not group:
        yield f"{name!r} has no key; an override reads key=value."
        return
    value: Any = override.value()
    if group not in groups or override.is_delete() or isinstance(value, dict):  # a mapping is merged into the node
        return
    options = groups[group]
    if isinstance(value, ChoiceSweep):
        yield from _missing_options(group, [str(item) for item in override.sweep_iterator()], options)
    elif isinstance(value, list):
        yield from _missing_options(group, [str(item) for item in value], options)
    elif not isinstance(value, str):
        yield f"{group!r} is a group: choose one of its options ({', '.join(options)}); got {name}."
    elif "${" not in value:
        yield from _missing_options(group, [value], options)


def _missing_options(group: str, chosen: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    for option in chosen:
        if option not in options:
            near = difflib.get_close_matches(option, options, n=3)
            hint = did_you_mean(option, options) if near else "choose one of these."
            yield f"{option!r} is no option of group {group!r} ({', '.join(options)}); {hint}"
