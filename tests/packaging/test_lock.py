# SPDX-License-Identifier: Apache-2.0
"""requirements.lock holds names, versions and hashes only, and fits pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
LOCK = (REPOSITORY / "requirements.lock").read_text()
LOCKED_EXTRAS = ("sims", "groot", "sweep", "logging", "dev")


def _locked() -> dict[str, str]:
    pins = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", LOCK, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pins}


def test_lock_records_no_address():
    assert not re.search(r"://|--(extra-)?index|find-links", LOCK)
    assert not (REPOSITORY / "uv.lock").exists()


def test_every_locked_package_has_a_hash():
    entries = re.split(r"\n(?=[A-Za-z0-9])", LOCK)
    pinned = [entry for entry in entries if re.match(r"[A-Za-z0-9._-]+==", entry)]
    assert len(pinned) > 100
    assert all("--hash=sha256:" in entry for entry in pinned)


def test_lock_fits_pyproject():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(r for e in LOCKED_EXTRAS for r in project["optional-dependencies"][e])]
    locked = _locked()
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        assert name in locked, f"{name} is missing; run `make lock`"
        assert requirement.specifier.contains(locked[name]), f"{name} {locked[name]} is outside {requirement}"


def test_gpu_packages_stay_out_of_the_lock():
    kept_out = {"flash-attn", "flash-attn-4", "transformer-engine", "deepspeed", "ray", "rlinf"}
    assert not kept_out & set(_locked())
