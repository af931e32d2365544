# SPDX-License-Identifier: Apache-2.0
"""Write the reference pages in docs/ from the code, so that they cannot drift from it (a test compares them)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import yaml

from embodix.hookspecs import EmbodixSpec, hook_names
from embodix.patching import patch_module, patch_names
from embodix.plugins import registry

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = REPOSITORY / "hydra_conf"
MARK = "<!-- Written by `make docs` from the code; do not edit. -->"


def hooks_page() -> str:
    """Every extension point with its exact arguments, and what embodix itself registers through it."""
    lines = [
        *("# Hooks", "", MARK, ""),
        "A plugin publishes a module under the entry-point group `embodix`; its functions carry `@embodix.hookimpl`",
        "and return `embodix.Registration(name, target, summary)` records. The target `package.module:attribute` is",
        "imported when it is first chosen. `tests/third_party/embodix_example_plugin` is a complete plugin to copy.",
    ]
    for name in hook_names():
        lines += ["", f"## `{hook_signature(name)}`", "", inspect.getdoc(getattr(EmbodixSpec, name)) or ""]
        lines += _registered(name.removeprefix("register_"))
    return "\n".join(lines) + "\n"


def hook_signature(name: str) -> str:
    """``name(arguments) -> result`` as in the specification, without ``self``."""
    signature = inspect.signature(getattr(EmbodixSpec, name))
    arguments = [p for p in signature.parameters.values() if p.name != "self"]
    return name + str(signature.replace(parameters=arguments)).replace("'", "")


def _registered(kind: str) -> Iterator[str]:
    found = registry()
    own = [r for name, r in found.implementations[kind].items() if found.providers[kind, name] == "builtin"]
    if not own:
        yield ""
        yield "embodix registers none itself."
        return
    yield from ("", "| name | what it does | target |", "|---|---|---|")
    for registration in own:
        yield f"| `{registration.name}` | {registration.summary} | `{registration.target}` |"


def config_groups_page() -> str:
    """Every Hydra config and group with its options, described by the first comment of each file."""
    lines = [
        *("# Config groups", "", MARK, ""),
        "Choose an option with `group=option`; a group that a command does not list by default is added with",
        "`+group=option`. `lerobot <verb> --cfg job` prints the composed config.",
        *("", "| config | default groups |", "|---|---|"),
    ]
    for path in sorted(CONFIGS.glob("*.yaml")):
        lines.append(f"| `{path.stem}` | {', '.join(_default_choices(path)) or 'none'} |")
    folders = sorted({path.parent for path in CONFIGS.glob("*/**/*.yaml")})
    for folder in folders:
        lines += ["", f"## {folder.relative_to(CONFIGS)}", "", "| option | what it chooses |", "|---|---|"]
        lines += [f"| `{path.stem}` | {_first_comment(path)} |" for path in sorted(folder.glob("*.yaml"))]
    return "\n".join(lines) + "\n"


def _default_choices(path: Path) -> list[str]:
    entries = yaml.safe_load(path.read_text()).get("defaults", [])
    choices = [next(iter(entry.items())) for entry in entries if isinstance(entry, dict)]
    own = [(group.split()[-1].lstrip("/"), option) for group, option in choices if option is not None]
    return [f"`{group}={option}`" for group, option in own if not group.startswith("hydra/")]


def _first_comment(path: Path) -> str:
    """The comment at the top of a file, without Hydra's package line."""
    words = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            words.append(line.removeprefix("#").strip())
    return " ".join(words).replace("|", "\\|")


def patches_page() -> str:
    """The papers of every patch."""
    lines = [
        *("# Patches", "", MARK, ""),
        "Guarded changes of upstream at run time, one file a patch in `patches/`. Nothing is patched because embodix",
        "is installed: a config's `patches` node or a verb asks for them, and they are undone at the end of the run.",
    ]
    for name in patch_names():
        patch = patch_module(name).PATCH
        requires = ", ".join(f"{host}{wanted}" for host, wanted in patch.requires.items())
        lines += ["", f"## {name}", "", f"- target: `{patch.target}`", f"- holds for: `{requires}`"]
        lines += [
            f"- {label}: {text}"
            for label, text in (
                ("symptom", patch.symptom),
                ("upstream", patch.upstream),
                ("why it is safe", patch.why_safe),
                ("goes when", patch.remove_when),
            )
        ]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Every generated page by its path in the repository."""
    return {
        "docs/hooks.md": hooks_page(),
        "docs/config-groups.md": config_groups_page(),
        "docs/patches.md": patches_page(),
    }


if __name__ == "__main__":
    for relative_path, content in pages().items():
        (REPOSITORY / relative_path).write_text(content)
        print(f"wrote {relative_path}")
