# SPDX-License-Identifier: Apache-2.0
"""Options of a config become arguments of the types that the callable announces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import pytest

from embodix import plugins
from embodix.arguments import ArgumentError, typed_arguments

if TYPE_CHECKING:
    from decimal import Decimal


class Takes:
    def __init__(
        self,
        *,
        flag: bool = False,
        count: int = 1,
        rate: float | None = None,
        word: str = "a",
        kind: Literal["best_fit", "first_fit"] = "best_fit",
        cost: str | Mapping[str, float] = "tokens",
        names: tuple[str, ...] = (),
        sizes: list[int] | None = None,
        unread: Decimal | None = None,
        free: Any = None,
    ) -> None: ...


@dataclass
class Settings:
    flag: bool = False
    shares: dict[str, float] = field(default_factory=dict)


@dataclass
class MoreSettings(Settings):
    count: int = 1


@pytest.mark.parametrize(
    ("option", "written", "read"),
    [
        ("flag", "no", False),
        ("flag", "off", False),
        ("flag", "Yes", True),
        ("flag", True, True),
        ("count", "3", 3),
        ("count", 1e3, 1000),
        ("count", 2**60 + 1, 2**60 + 1),
        ("rate", None, None),
        ("rate", "0.5", 0.5),
        ("rate", 2, 2.0),
        ("word", 7, "7"),
        ("kind", "first_fit", "first_fit"),
        ("cost", {"tokens": "2"}, {"tokens": 2.0}),
        ("cost", "tokens", "tokens"),
        ("names", ["a", "b"], ("a", "b")),
        ("sizes", ["1", 2], [1, 2]),
        ("unread", "no", "no"),
        ("free", "no", "no"),
    ],
)
def test_a_value_is_read_as_its_type(option: str, written: Any, read: Any) -> None:
    found = typed_arguments(Takes, {option: written}, "it")[option]
    assert found == read
    assert type(found) is type(read)


@pytest.mark.parametrize(
    ("option", "written", "message"),
    [
        ("flag", "maybe", "it, option 'flag', is true or false; got 'maybe'."),
        ("flag", 2, "it, option 'flag', is true or false; got 2."),
        ("count", "many", "it, option 'count', is a whole number; got 'many'."),
        ("count", 1.5, "it, option 'count', is a whole number; got 1.5."),
        ("count", True, "it, option 'count', is a whole number; got True."),
        ("count", float("inf"), "it, option 'count', is a whole number; got inf."),
        ("rate", "fast", "it, option 'rate', is one of float | null; got 'fast'."),
        ("word", [1], r"it, option 'word', is a word; got \[1\]."),
        ("kind", "best_fitt", "is one of best_fit, first_fit; got 'best_fitt'. Did you mean best_fit"),
        ("names", "a", "it, option 'names', is a list; got 'a'."),
        ("flagg", True, "it has no option 'flagg'. Did you mean 'flag'"),
    ],
)
def test_a_value_of_another_type_is_refused(option: str, written: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        typed_arguments(Takes, {option: written}, "it")


def test_fields_of_dataclasses_and_of_their_bases_are_known() -> None:
    options = {"flag": "off", "count": "2", "shares": {"a": "0.5"}}
    assert typed_arguments(MoreSettings, options, "it") == {"flag": False, "count": 2, "shares": {"a": 0.5}}


def test_a_callable_that_takes_anything_gets_it_as_it_stands() -> None:
    assert typed_arguments(lambda **options: options, {"x": "no"}, "it") == {"x": "no"}


@pytest.mark.parametrize(
    ("kind", "name", "options", "wanted"),
    [
        ("quantizers", "fp8_block", {"embeddings": "no", "strict": "yes"}, {"embeddings": False, "strict": True}),
        ("packers", "token_budget", {"budget": "900", "look_ahead": "8"}, {"budget": 900.0, "look_ahead": 8}),
        ("precisions", "torchao", {"compile": "no"}, {"compile": False}),
        ("runners", "rlinf_async", {"decoupled": "off", "queue_size": "2"}, {"decoupled": False, "queue_size": 2}),
    ],
)
def test_what_ships_is_typed(kind: str, name: str, options: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert plugins.registry().arguments(kind, name, options) == wanted
