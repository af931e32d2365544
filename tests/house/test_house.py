# SPDX-License-Identifier: Apache-2.0
"""The shape of the house: who may know whom by name, and that every hook is used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from embodix.hookspecs import hook_names
from embodix.plugins import registry
from embodix.policies.support import support_of

REPOSITORY = Path(__file__).resolve().parents[2]
PRODUCT = ("plugins", "hydra_conf", "patches")
SUFFIXES = (".py", ".yaml", ".j2", ".md")
# What a plugin's parts are called where its own name does not stand: classes, modules and repositories of upstream.
PARTS = {"pi05": ("pi0.5", "paligemma"), "groot": ("gr00t", "eagle")}
SUBJECTS = {
    "a simulator": ("metaworld", "libero", "pusht", "maniskill", "isaac"),
    "a number format": ("fp8", "float8", "e4m3"),
    "reinforcement learning": ("rlinf", "reinforcement", "rl_vla3"),
}
# A container's names of its element types, which are torch's and safetensors' own.
ELEMENT_TYPES = re.compile(r"torch\.float8_e\dm\d(fn)?|F8_E\dM\d")
CORE = (REPOSITORY / "plugins" / "embodix", REPOSITORY / "hydra_conf", REPOSITORY / "patches")


def product_files() -> list[Path]:
    """Every file of the product, none through a link."""
    found = [path for folder in PRODUCT for path in (REPOSITORY / folder).rglob("*")]
    files = [path for path in found if path.suffix in SUFFIXES and "__pycache__" not in path.parts]
    assert len(files) > 200
    return files


def policies() -> list[str]:
    return registry().names("policies")


def folder_of(policy_type: str) -> Path:
    """The package that registers a policy."""
    target = registry().registration("policies", policy_type).target
    return REPOSITORY / "plugins" / target.partition(".")[0]


def lines_with(words: tuple[str, ...], files: list[Path]) -> list[str]:
    """``file:line: text`` of every line that holds one of the words, in any case."""
    pattern = re.compile("|".join(map(re.escape, words)), re.IGNORECASE)
    return [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if pattern.search(ELEMENT_TYPES.sub("", line))
    ]


def test_both_shipped_policies_are_registered():
    assert {"pi05", "groot"} <= set(policies())


@pytest.mark.parametrize("policy_type", policies())
def test_no_file_outside_a_policys_folder_contains_its_name(policy_type):
    support, folder = support_of(policy_type), folder_of(policy_type)
    words = (policy_type, support.display_name, support.config_group, *PARTS.get(policy_type, ()))
    inside = [path for path in product_files() if folder in path.parents]
    outside = [path for path in product_files() if folder not in path.parents]
    assert lines_with(words, inside), "the words name the policy where it is at home"
    assert lines_with(words, outside) == []


@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_core_names_none_of_what_its_plugins_bring(subject):
    core = [path for path in product_files() if any(folder in path.parents for folder in CORE)]
    elsewhere = [path for path in product_files() if path not in core]
    assert len(core) > 100
    assert lines_with(SUBJECTS[subject], elsewhere)
    assert lines_with(SUBJECTS[subject], core) == []


@pytest.mark.parametrize("hook", hook_names())
def test_every_hook_has_a_consumer_in_the_product(hook):
    """A consumer asks the registry for the kind by name; specifications and registrations do not count."""
    kind = hook.removeprefix("register_")
    asks = re.compile(rf"""["']{kind}["']""")
    found = [
        path
        for path in product_files()
        if path.suffix == ".py" and path.name != "hookspecs.py" and asks.search(path.read_text())
    ]
    assert found, f"nothing in the product asks for {kind}"


@pytest.mark.parametrize("hook", hook_names())
def test_every_hook_is_used_by_what_ships(hook):
    assert registry().names(hook.removeprefix("register_"))


def test_everything_that_ships_is_registered_by_an_entry_point():
    packages = {path.name for path in (REPOSITORY / "plugins").glob("embodix*")}
    registering = {record.target.partition(".")[0] for record in registry().plugins}
    assert len(packages) > 5
    assert packages <= registering
