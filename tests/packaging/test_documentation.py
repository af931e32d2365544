# SPDX-License-Identifier: Apache-2.0
"""Documentation agrees with the code: reference pages, hooks with their arguments, the tree in the README."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
from pathlib import Path

import pytest

from embodix.hookspecs import EmbodixSpec, hook_names

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text()
TREE_GLYPHS = "│├└─ \t"


def _reference():
    spec = importlib.util.spec_from_file_location("reference", REPOSITORY / "scripts" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["docs/hooks.md", "docs/config-groups.md", "docs/patches.md"])
def test_reference_page_is_up_to_date(page):
    assert (REPOSITORY / page).read_text() == _reference().pages()[page], "run `make docs` and commit the result"


@pytest.mark.parametrize("hook", hook_names())
def test_every_hook_is_documented_with_its_exact_arguments(hook):
    heading = re.search(rf"^## `{hook}\((.*)\) -> list\[Registration\]`$", _hooks_page(), re.MULTILINE)
    assert heading, f"docs/hooks.md has no heading for {hook}"
    documented = [argument.split(":")[0].strip() for argument in heading[1].split(",") if argument]
    assert documented == [name for name in inspect.signature(getattr(EmbodixSpec, hook)).parameters if name != "self"]


def test_no_hook_is_documented_that_does_not_exist():
    assert re.findall(r"^## `(register_\w+)", _hooks_page(), re.MULTILINE) == hook_names()


def test_every_config_file_says_what_it_is_for():
    silent = [row for row in (REPOSITORY / "docs/config-groups.md").read_text().splitlines() if row.endswith("|  |")]
    assert not silent, "begin each YAML of hydra_conf/ with a comment"


@pytest.mark.skipif(len(README.splitlines()) < 5, reason="README.md is not written yet")
def test_readme_tree_lists_every_folder_with_a_purpose():
    listed = _readme_tree()
    tracked = _tracked_folders()
    assert {name for name, purpose in listed.items() if not purpose} == set()
    packages = {path.name for path in tracked if path.parent == Path("plugins/embodix")}
    assert packages - set(listed) == set(), "folders that the README's tree does not list"
    assert set(listed) - {path.name for path in tracked} == set(), "folders in the README's tree that do not exist"


def _readme_tree() -> dict[str, str]:
    """Folder -> purpose, from the code block of the README that shows ``plugins/``."""
    blocks = re.findall(r"```\w*\n(.*?)```", README, re.DOTALL)
    trees = [block for block in blocks if re.search(rf"^[{TREE_GLYPHS}]*plugins/", block, re.MULTILINE)]
    assert trees, "README.md shows no tree of the repository"
    entries = [line.strip(TREE_GLYPHS).partition(" ") for line in trees[0].splitlines()]
    return {name.rstrip("/").split("/")[-1]: rest.strip(" #") for name, _, rest in entries if name.endswith("/")}


def _tracked_folders() -> set[Path]:
    files = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return {parent for line in files.splitlines() for parent in Path(line).parents if parent != Path()}


def _hooks_page() -> str:
    return (REPOSITORY / "docs" / "hooks.md").read_text()
