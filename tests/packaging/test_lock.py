# SPDX-License-Identifier: Apache-2.0
"""The lock files hold names, versions and hashes only, and fit pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
LOCK = (REPOSITORY / "requirements.lock").read_text()
LIBERO_LOCK = (REPOSITORY / "requirements-libero.lock").read_text()
RL_LOCK = (REPOSITORY / "requirements-rl.lock").read_text()
LOCKED_EXTRAS = ("sims", "pusht", "groot", "fp8", "deepspeed", "sweep", "logging", "dev")


def _locked(lock: str = LOCK) -> dict[str, str]:
    pins = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", lock, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pins}


@pytest.mark.parametrize(
    "lock", [LOCK, LIBERO_LOCK, RL_LOCK], ids=["requirements", "requirements-libero", "requirements-rl"]
)
def test_lock_records_no_address(lock):
    assert not re.search(r"://|--(extra-)?index|find-links", lock)
    assert not (REPOSITORY / "uv.lock").exists()


@pytest.mark.parametrize(("lock", "num_least"), [(LOCK, 100), (LIBERO_LOCK, 15), (RL_LOCK, 40)])
def test_every_locked_package_has_a_hash(lock, num_least):
    entries = re.split(r"\n(?=[A-Za-z0-9])", lock)
    pinned = [entry for entry in entries if re.match(r"[A-Za-z0-9._-]+==", entry)]
    assert len(pinned) > num_least
    assert all("--hash=sha256:" in entry for entry in pinned)


def test_lock_fits_pyproject():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(r for e in LOCKED_EXTRAS for r in project["optional-dependencies"][e])]
    locked = _locked()
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        assert name in locked, f"{name} is missing; run `make lock`"
        assert requirement.specifier.contains(locked[name]), f"{name} {locked[name]} is outside {requirement}"


def test_libero_adds_to_the_lock_and_moves_nothing():
    libero = _locked(LIBERO_LOCK)
    assert not set(libero) & set(_locked())
    assert not set(libero) & {"robomimic", "hf-egl-probe", "thop", "opencv-python"}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, project["optional-dependencies"]["libero"]):
        locked = {**_locked(), **libero}[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(locked), f"{requirement.name} {locked} is outside {requirement}"


def test_rl_adds_to_the_lock_and_moves_nothing():
    rl = _locked(RL_LOCK)
    assert not set(rl) & set(_locked())
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, project["optional-dependencies"]["rl"]):
        assert requirement.specifier.contains(rl[canonicalize_name(requirement.name)])


def test_gpu_packages_stay_out_of_the_lock():
    kept_out = {"flash-attn", "flash-attn-4", "transformer-engine", "ray", "rlinf"}
    assert not kept_out & set(_locked())
