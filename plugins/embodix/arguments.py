# SPDX-License-Identifier: Apache-2.0
"""Options of a config as keyword arguments: names and types as the callable that takes them announces.

A config holds words: ``no`` is a string until somebody who knows that a bool is wanted reads it. The annotations of the
callable know; what is not annotated is passed on as it stands.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

TRUE, FALSE = ("true", "yes", "on", "y"), ("false", "no", "off", "n")
SEQUENCES: tuple[Any, ...] = (list, tuple, collections.abc.Sequence, collections.abc.Iterable)
MAPPINGS: tuple[Any, ...] = (dict, collections.abc.Mapping)


class ArgumentError(ValueError):
    """An option that the callable does not take, or a value that is none of its type."""


def typed_arguments(target: Callable[..., Any], options: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """The options with the values that the annotations of their parameters ask for.

    Args:
        target: a class or function, called with keywords.
        options: as a config holds them.
        owner: whose options they are, for messages.

    Raises:
        ArgumentError: an option without a parameter (with the nearest), or a value that can't be read as its type.
    """
    parameters = inspect.signature(target).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [option for option in options if option not in parameters]
    if unknown and not takes_any:
        near = difflib.get_close_matches(unknown[0], parameters, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ArgumentError(
            f"{owner} has no option {', '.join(map(repr, unknown))}.{hint} Options: {', '.join(parameters) or 'none'}."
        )
    hints = _annotations(target)
    return {name: _typed(value, hints.get(name, Any), f"{owner}, option {name!r}") for name, value in options.items()}


def _annotations(target: Callable[..., Any]) -> dict[str, Any]:
    """Parameter -> type; one whose type is imported for type checkers alone is left out."""
    described: Any = target
    if inspect.isclass(target) and not dataclasses.is_dataclass(target):
        described = target.__init__
    owners = reversed(described.__mro__) if inspect.isclass(described) else [described]
    return {name: hint for owner in owners for name, hint in _own_annotations(owner).items()}


def _own_annotations(owner: Any) -> dict[str, Any]:
    found = {}
    for name, annotation in inspect.get_annotations(owner).items():
        try:
            found[name] = typing.get_type_hints(_Annotated(owner, {name: annotation}))[name]
        except NameError:
            continue
    return found


class _Annotated:
    """One annotation in the module of its owner, for ``typing.get_type_hints``."""

    def __init__(self, owner: Any, annotations: dict[str, Any]) -> None:
        self.__annotations__ = annotations
        self.__globals__ = getattr(owner, "__globals__", None) or vars(inspect.getmodule(owner))


def _typed(value: Any, hint: Any, where: str) -> Any:
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _of_a_union(value, members, hint, where)
    if origin is typing.Literal:
        return _literal(value, members, where)
    if origin in SEQUENCES or hint in SEQUENCES:
        return _sequence(value, members, where, tuple if origin is tuple else list)
    if origin in MAPPINGS or hint in MAPPINGS:
        return _mapping(value, members, where)
    reader = READERS.get(hint)
    return value if reader is None else reader(value, where)


def _of_a_union(value: Any, members: tuple[Any, ...], hint: Any, where: str) -> Any:
    """The value as the member that is its type, else as the first that can read it."""
    own = [member for member in members if type(value) is (typing.get_origin(member) or member)]
    for member in own or members:
        try:
            return _typed(value, member, where)
        except ArgumentError:
            continue
    raise ArgumentError(f"{where}, is one of {_name(hint)}; got {value!r}.")


def _literal(value: Any, members: tuple[Any, ...], where: str) -> Any:
    if value in members:
        return value
    near = difflib.get_close_matches(str(value), [str(member) for member in members], n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ArgumentError(f"{where}, is one of {', '.join(map(str, members))}; got {value!r}.{hint}")


def _sequence(value: Any, members: tuple[Any, ...], where: str, kind: type) -> Any:
    if isinstance(value, str) or not isinstance(value, collections.abc.Sequence):
        raise ArgumentError(f"{where}, is a list; got {value!r}. Write it as [a,b].")
    return kind(_typed(item, members[0] if members else Any, where) for item in value)


def _mapping(value: Any, members: tuple[Any, ...], where: str) -> Any:
    if not isinstance(value, collections.abc.Mapping):
        raise ArgumentError(f"{where}, is a mapping; got {value!r}. Write it as {{name: value}}.")
    return {key: _typed(item, members[1] if members else Any, where) for key, item in value.items()}


def _bool(value: Any, where: str) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word not in TRUE + FALSE:
        raise ArgumentError(f"{where}, is true or false; got {value!r}.")
    return word in TRUE


def _int(value: Any, where: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = _float(value, where, "a whole number")
    if not number.is_integer():
        raise ArgumentError(f"{where}, is a whole number; got {value!r}.")
    return int(number)


def _float(value: Any, where: str, wanted: str = "a number") -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{where}, is {wanted}; got {value!r}.") from error


def _str(value: Any, where: str) -> str:
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    raise ArgumentError(f"{where}, is a word; got {value!r}.")


def _none(value: Any, where: str) -> None:
    if value is not None:
        raise ArgumentError(f"{where}, is null; got {value!r}.")


def _name(hint: Any) -> str:
    return " | ".join(
        "null" if member is type(None) else str(getattr(member, "__name__", member)) for member in typing.get_args(hint)
    )


READERS: dict[Any, Callable[[Any, str], Any]] = {bool: _bool, int: _int, float: _float, str: _str, type(None): _none}
