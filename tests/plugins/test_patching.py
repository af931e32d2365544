# SPDX-License-Identifier: Apache-2.0
"""Patches are explicit, version-ranged, applied at most once and undone."""

from __future__ import annotations

import sys
import types

import pytest

from embodix import Registration, patching, plugins
from embodix.patching import Patch, PatchError, apply_patch, is_applied, patched, undo_patch
from embodix.plugins import PluginRegistry

HOST = types.SimpleNamespace(limit=1, name="host")


def _patch_module(name: str, attribute: str, requires: dict[str, str]) -> types.SimpleNamespace:
    papers = dict.fromkeys(("symptom", "upstream", "why_safe", "remove_when"), "a reason")

    def apply(value: object = 2):
        return patching.replace_attribute(HOST, attribute, value)

    return types.SimpleNamespace(PATCH=Patch(name, f"host.{attribute}", requires, **papers), apply=apply)


@pytest.fixture(autouse=True)
def host_patches(monkeypatch):
    """Two patches of a small host that fit, and one that does not."""
    modules = {
        "raise_limit": _patch_module("raise_limit", "limit", {"pluggy": ">=1"}),
        "rename": _patch_module("rename", "name", {}),
        "too_old": _patch_module("too_old", "limit", {"pluggy": ">=900"}),
        "no_host": _patch_module("no_host", "limit", {"a-host-that-nobody-installed": ">=1"}),
    }
    registry = PluginRegistry(implementations={"host_patches": {}})
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"a_host_{name}", module)
        registry.implementations["host_patches"][name] = Registration(name, f"a_host_{name}:PATCH", "a patch")
    monkeypatch.setattr(plugins, "registry", lambda: registry)
    yield
    assert (HOST.limit, HOST.name) == (1, "host"), "a test left the host patched"
    assert not patching._applied


def test_a_patch_holds_inside_the_block_only():
    with patched({"raise_limit": None, "rename": {"value": "other"}}):
        assert (HOST.limit, HOST.name) == (2, "other")
        assert is_applied("raise_limit")
    assert not is_applied("raise_limit")


def test_a_patch_is_undone_when_the_block_fails():
    with pytest.raises(KeyError), patched({"raise_limit": {}}):
        raise KeyError


def test_earlier_patches_are_undone_when_a_later_one_does_not_fit():
    with pytest.raises(PatchError), patched({"raise_limit": {}, "too_old": {}}):
        pytest.fail("the block must not start")


def test_a_second_use_with_the_same_options_is_counted_not_applied_again():
    apply_patch("raise_limit", value=5)
    apply_patch("raise_limit", value=5)
    undo_patch("raise_limit")
    assert HOST.limit == 5
    undo_patch("raise_limit")
    assert HOST.limit == 1


def test_a_second_use_with_other_options_is_refused():
    with patched({"raise_limit": {"value": 5}}), pytest.raises(PatchError, match=r"already applied with.*5.*got.*6"):
        apply_patch("raise_limit", value=6)


@pytest.mark.parametrize(("name", "found"), [("too_old", r"found \d"), ("no_host", "found none")])
def test_a_version_out_of_range_says_wanted_found_and_what_to_do(name, found):
    with pytest.raises(PatchError, match=rf"wanted .*>=.*{found}.*pip install"):
        apply_patch(name)


def test_an_unknown_patch_lists_those_that_exist():
    with pytest.raises(PatchError, match="No patch is called 'raise'; known: no_host, raise_limit, rename, too_old"):
        apply_patch("raise")


def test_undoing_what_is_not_applied_is_an_error():
    with pytest.raises(PatchError, match="'rename' is not applied; applied: none"):
        undo_patch("rename")


class _Base:
    @classmethod
    def make(cls):
        return cls


class _Host(_Base):
    @classmethod
    def load(cls):
        return cls


def test_an_undone_class_method_is_a_class_method_again():
    undo = patching.replace_attribute(_Host, "load", lambda: None)
    undo()
    assert type("Child", (_Host,), {}).load().__name__ == "Child"


def test_what_was_inherited_is_inherited_again():
    undo = patching.replace_attribute(_Host, "make", lambda: None)
    assert _Host.make() is None
    undo()
    assert "make" not in vars(_Host) and _Host.make() is _Host


def test_replacing_what_the_host_does_not_have_is_an_error():
    with pytest.raises(PatchError, match="no attribute 'gone' to replace"):
        patching.replace_attribute(_Host, "gone", None)
