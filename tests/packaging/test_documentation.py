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
README_FILE, CONTRIBUTING_FILE = REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"
README = README_FILE.read_text()
CORE = Path("plugins/embodix")
# Every folder of the core with code, and every plugin beside it.
ROOMS = sorted(
    path.parent.relative_to(REPOSITORY)
    for folder in (CORE, CORE.parent)
    for path in (REPOSITORY / folder).glob("*/__init__.py")
    if not path.parent.is_symlink() and path.parent != REPOSITORY / CORE
)
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
    packages = {path.name for path in tracked if path.parent in (Path("plugins"), Path("plugins/embodix"))}
    assert len(packages) > 20
    assert packages - set(listed) == set(), "folders that the README's tree does not list"
    assert set(listed) - {path.name for path in tracked} == set(), "folders in the README's tree that do not exist"


@pytest.mark.parametrize("page", [README_FILE, CONTRIBUTING_FILE], ids=lambda page: page.name)
def test_links_of_the_front_pages_lead_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if "://" not in link]
    assert links
    assert [link for link in links if not (REPOSITORY / link).exists()] == []


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_every_room_says_what_each_of_its_files_holds(room):
    text = (REPOSITORY / room / "README.md").read_text()
    parts = [path.name for path in _code_of(room) if not path.stem.startswith("__")]
    assert [part for part in parts if f"{part}`" not in text] == [], "a line of the room's README is missing"


def test_all_rooms_are_looked_at():
    assert len(ROOMS) > 20
    assert sum(len(_code_of(room)) for room in ROOMS) > 150


@pytest.mark.parametrize("folder", [Path(), *ROOMS], ids=str)
def test_files_and_modules_that_are_named_exist(folder):
    page = REPOSITORY / folder / "README.md" if folder in ROOMS else CONTRIBUTING_FILE
    paths, modules = _named(page.read_text())
    assert paths or not _code_of(folder)
    assert [path for path in paths if not _exists(path, page.parent)] == []
    assert [module for module in modules if not _is_module_or_attribute(module)] == []


def _named(text: str) -> tuple[list[str], list[str]]:
    """Modules by file, configs by group, and dotted names of embodix, between backticks and without placeholders."""
    quoted = [name for name in re.findall(r"`([^`\s]+)`", text) if not set(name) & set("<>{}*=")]
    paths = [name for name in quoted if re.fullmatch(r"[\w./-]+\.py|[\w./-]+/[\w.-]+\.(yaml|json|md)", name)]
    modules = [name for name in quoted if re.fullmatch(r"embodix\w*(\.\w+)+", name) and name not in paths]
    return paths, modules


def _exists(path: str, folder: Path) -> bool:
    """Whether there is such a file, by its path from one of these places or its last parts below the page's folder."""
    places = (REPOSITORY, REPOSITORY / "plugins", REPOSITORY / CORE)
    return any((place / path).exists() for place in places) or any(folder.rglob(path))


def _is_module_or_attribute(name: str) -> bool:
    """Whether a dotted name is a module or package of ``plugins/``, or stands in the text of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        place = REPOSITORY / "plugins" / Path(*parts[:length])
        module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if module.exists():
            return all(re.search(rf"\b{part}\b", module.read_text()) for part in parts[length:])
    return False


def _code_of(room: Path) -> list[Path]:
    return sorted((REPOSITORY / room).glob("*.py"))


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
