# SPDX-License-Identifier: Apache-2.0
"""Every patch that ships carries its papers and refuses a host out of its range."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util

import pytest
from packaging.specifiers import SpecifierSet

from embodix.patching import PatchError, apply_patch, is_applied, patch_module, patch_names

OPTIONAL_HOSTS = ("rlinf",)  # extras: their patches ship, and apply where they are installed


def _is_installed(host):
    return importlib.util.find_spec(host) is not None


@pytest.mark.parametrize("name", patch_names())
def test_patch_has_its_papers(name):
    patch = patch_module(name).PATCH
    assert patch.name == name
    assert all(getattr(patch, field.name) for field in dataclasses.fields(patch))
    for host, wanted in patch.requires.items():
        assert any(s.operator in ("<", "<=", "==", "~=") for s in SpecifierSet(wanted)), f"{host}{wanted} has no end"


@pytest.mark.parametrize("name", patch_names())
def test_patch_fits_the_installed_host(name):
    problem = patch_module(name).PATCH.version_problem()
    missing = [host for host in patch_module(name).PATCH.requires if host in OPTIONAL_HOSTS and not _is_installed(host)]
    if not missing:
        assert problem is None
        return
    assert problem is not None and f"wanted {missing[0]}" in problem and "found none; install it" in problem
    with pytest.raises(PatchError, match=f"wanted {missing[0]}.*found none"):
        apply_patch(name)
    assert not is_applied(name)


@pytest.mark.parametrize("name", patch_names())
def test_patch_refuses_a_later_host(name, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda distribution: "99.0")
    with pytest.raises(PatchError, match=r"does not fit this host: wanted .*found 99\.0"):
        apply_patch(name)
    assert not is_applied(name)
