# SPDX-License-Identifier: Apache-2.0
"""Broken distributions are all listed, hide nothing, and stop a strict run with their reasons."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

THIRD_PARTY = Path(__file__).parent
SHIPPED = {point.name for point in entry_points(group="embodix")}
BROKEN = {
    "broken_import": "No module named 'a_package_that_nobody_installed'",
    "broken_hook_name": "unknown hook 'register_packer'",
    "broken_arguments": "Argument(s) {'policy_type'}",
    "broken_exit": "SystemExit: this package needs a licence",
    "broken_names": "packer 'padding_free' is registered by both 'builtin' and 'broken_names'",
}


@pytest.fixture(scope="module")
def environment(new_environment: Callable, wheel: Path):
    """embodix from its wheel, the healthy example plugin and the broken ones."""
    environment = new_environment("broken_plugins")
    folders = ["embodix_example_plugin", *BROKEN]
    environment.install(wheel, *(THIRD_PARTY / folder for folder in folders))
    return environment


@pytest.fixture(scope="module")
def diagnosis(environment):
    result = environment.run("embodix", "doctor", "policy=pi05_small", "--json")
    assert result.returncode == 1
    return json.loads(result.stdout)


@pytest.mark.parametrize(("name", "reason"), BROKEN.items())
def test_doctor_lists_each_with_its_traceback(diagnosis, name, reason):
    found = next(plugin for plugin in diagnosis["plugins"] if plugin["name"] == name)
    assert "Traceback" in found["error"] and reason in found["error"]
    assert found["distribution"] == f"embodix-{name.replace('_', '-')} 1.0.0"
    assert any(repr(name) in need and "strict_plugins=false" in need for need in diagnosis["needs"])


def test_doctor_still_shows_the_healthy_ones(diagnosis):
    healthy = {plugin["name"] for plugin in diagnosis["plugins"] if plugin["error"] is None}
    assert healthy == {"example", *SHIPPED}
    assert "bucketed" in {found["name"] for found in diagnosis["implementations"]}


def test_doctor_prints_tracebacks_for_people(environment):
    result = environment.run("embodix", "doctor", "policy=pi05_small")
    assert result.returncode == 1
    for reason in BROKEN.values():
        assert reason in result.stdout


def test_a_config_that_leaves_them_out_is_healthy(environment):
    result = environment.run("embodix", "doctor", "policy=pi05_small", "strict_plugins=false", "--json")
    assert (result.returncode, json.loads(result.stdout)["needs"]) == (0, [])


def test_a_strict_run_is_refused_with_every_reason(environment):
    result = environment.run("lerobot", "train", "policy=pi05_small", "train.steps=1")
    assert result.returncode == 1
    assert f"{len(BROKEN)} plugin(s) failed to load" in result.stderr, result.stderr
    for reason in BROKEN.values():
        assert reason in result.stderr
