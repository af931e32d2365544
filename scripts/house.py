# SPDX-License-Identifier: Apache-2.0
"""Figures of the house: how much there is, how often a name means two things, how many files one step passes.

python scripts/house.py                      counts
python scripts/house.py --step <recording>   also trains two small steps and counts the files the second one passes
python scripts/house.py --lists              names what is counted
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PRODUCT = ("plugins", "patches", "hydra_conf")


def product_modules() -> dict[str, Path]:
    """Dotted name -> file of every module that is product: not the testing helpers, nothing through a link."""
    found = {}
    for folder in PRODUCT:
        for path in (REPOSITORY / folder).rglob("*.py"):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            if "testing" in path.stem.split("_")[:1] or "testing" in parts:
                continue
            parts = parts[1:] if parts[0] == "plugins" else ("embodix", *parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Modules and attributes that a module imports, targets of registrations included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("embodix"):
            yield node.value.partition(":")[0]


def importers(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Module -> the modules that import it."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, path in modules.items():
        for imported in imported_names(ast.parse(path.read_text())):
            if imported in modules and imported != name:
                found[imported].add(name)
    return found


def repeated(names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Name -> its places, for names with several."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, place in names:
        places[name].append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def class_names(modules: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """Public classes, with their modules."""
    for name, path in modules.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, name


def private_names(modules: dict[str, Path]) -> set[str]:
    """Names with an underscore that the product defines."""
    found = set()
    for path in modules.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {name for name in found if re.match(r"_[A-Za-z]", name)}


def private_accesses(defined: set[str]) -> list[str]:
    """Places in tests that reach for a private name that the product defines."""
    found = []
    for path in sorted((REPOSITORY / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Attribute) and not _is_own(node):
                names.append(node.attr)
            private = [name for name in names if name in defined]
            found += [f"{path.relative_to(REPOSITORY)}:{node.lineno} {name}" for name in private]
    return found


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os", "sys")


def files_of_a_step(recording: Path) -> list[str]:
    """Files of the product that run between the fetch of the second batch and the fetch of the third.

    Args:
        recording: of ``lerobot data``, small images.
    """
    from embodix.testing.host_runs import train_here
    from embodix.training.session import TrainingSession
    from embodix_pi05.testing import small_run

    passed: set[str] = set()
    state = {"fetches": 0}
    root = str(REPOSITORY) + "/"

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and state["fetches"] == 2 and name.startswith(root) and "/.venv/" not in name:
            passed.add(name.removeprefix(root))

    starts = TrainingSession._fetch_starts

    def fetch_starts(session: TrainingSession) -> None:
        state["fetches"] += 1
        starts(session)

    TrainingSession._fetch_starts = fetch_starts  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        options = ("+plugin=embodix", "train.steps=3", "train.save_checkpoint=false", f"train.output_dir={folder}/run")
        sys.setprofile(profile)
        try:
            train_here(small_run(recording, *options))
        finally:
            sys.setprofile(None)
    return sorted(name for name in passed if name.startswith(PRODUCT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=Path, metavar="RECORDING")
    parser.add_argument("--lists", action="store_true")
    arguments = parser.parse_args()
    modules = product_modules()
    of_module = importers(modules)
    files = [name for name, path in modules.items() if path.name != "__init__.py"]
    found: dict[str, list[str]] = {
        "modules with one importer": [
            f"{name} <- {next(iter(of_module[name]))}" for name in files if len(of_module[name]) == 1
        ],
        "basenames that files share": [
            f"{name}: {', '.join(places)}"
            for name, places in repeated((modules[name].name, name) for name in files).items()
        ],
        "class names with two meanings": [
            f"{name}: {', '.join(places)}" for name, places in repeated(class_names(modules)).items()
        ],
        "private accesses from tests": private_accesses(private_names(modules)),
    }
    if arguments.step is not None:
        found["files that one training step passes"] = files_of_a_step(arguments.step)
    print(f"product lines: {sum(len(path.read_text().splitlines()) for path in modules.values())}")
    print(f"product files: {len(modules)}, {len(files)} of them modules")
    for title, names in found.items():
        share = f" ({len(names) / len(files):.0%})" if title.startswith("modules") else ""
        print(f"{title}: {len(names)}{share}")
        if arguments.lists:
            print("\n".join(f"  {name}" for name in sorted(names)))
    rooms = Counter(name.rpartition(".")[0] for name in files)
    if arguments.lists:
        print("modules a room:", ", ".join(f"{room} {count}" for room, count in rooms.most_common()))


if __name__ == "__main__":
    main()
