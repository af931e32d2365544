# SPDX-License-Identifier: Apache-2.0
"""Write the reference pages in docs/ from the code, so that they cannot drift from it (a test compares them)."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path

import yaml

from embodix.checks.catalogue import KINDS
from embodix.cli.upstream_flags import EVAL, TRAIN
from embodix.config.compose import config_packages
from embodix.hookspecs import EmbodixSpec, hook_names
from embodix.patching import patch_module, patch_names
from embodix.plugins import registry

REPOSITORY = Path(__file__).resolve().parents[1]
CORE = "builtin"  # the entry point of the core's own implementations
MARK = "<!-- Written by `make docs` from the code; do not edit. -->"


def hooks_page() -> str:
    """Every extension point with its exact arguments, and what ships through it, with the plugin that brings it."""
    lines = [
        *("# Hooks", "", MARK, ""),
        "A plugin publishes a module under the entry-point group `embodix`; its functions carry `@embodix.hookimpl`",
        "and return `embodix.Registration(name, target, summary)` records. The target `package.module:attribute` is",
        "imported when it is first chosen. `plugins/embodix/contracts.py` says what it has to satisfy. To copy:",
        "`tests/third_party/embodix_example_plugin` (packers, attention), `tests/third_party/lerobot_policy_prompted`",
        f"(a policy). What is listed ships with embodix: `{CORE}` is the core, the others are packages beside it in",
        "`plugins/`, registered as a third party's are.",
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


def shipped_plugins() -> dict[str, str]:
    """Entry point -> package of every plugin of this repository; what else is installed here is left out."""
    packages = {record.name: record.target.partition(".")[0] for record in registry().plugins if record.healthy}
    return {name: package for name, package in packages.items() if (REPOSITORY / "plugins" / package).is_dir()}


def _plugin_of(kind: str, name: str) -> str:
    return registry().providers[kind, name]


def _registered(kind: str) -> Iterator[str]:
    shipped = shipped_plugins()
    own = [r for name, r in registry().implementations[kind].items() if _plugin_of(kind, name) in shipped]
    yield from ("", "| name | what it does | plugin | target |", "|---|---|---|---|")
    for registration in own:
        plugin = _plugin_of(kind, registration.name)
        yield f"| `{registration.name}` | {registration.summary} | `{plugin}` | `{registration.target}` |"


def config_folders() -> dict[str, Path]:
    """Plugin -> folder of its config groups, the core's first."""
    registrations = registry().implementations["config_packages"].values()
    plugins = {r.target.partition(":")[0]: _plugin_of("config_packages", r.name) for r in registrations}
    found = [(plugins[package], package) for package in config_packages() if plugins[package] in shipped_plugins()]
    return {plugin: REPOSITORY / "plugins" / package.replace(".", "/") for plugin, package in found}


def config_groups_page() -> str:
    """Every Hydra config and group with its options, described by the first comment of each file."""
    lines = [
        *("# Config groups", "", MARK, ""),
        "Choose an option with `group=option`; a group that a command does not list by default is added with",
        "`+group=option`. `lerobot <verb> --cfg job` prints the composed config. An option `default` stands for what a",
        f"plugin gives where none is named. `{CORE}` is the core, the other names are those of shipped plugins.",
        *("", "| config | plugin | default groups |", "|---|---|---|"),
    ]
    folders = config_folders()
    configs = [(path.stem, plugin, path) for plugin, folder in folders.items() for path in folder.glob("*.yaml")]
    for name, plugin, path in sorted(configs):
        lines.append(f"| `{name}` | `{plugin}` | {', '.join(_default_choices(path)) or 'none'} |")
    options = [
        (str(path.parent.relative_to(folder)), path.stem, plugin, path)
        for plugin, folder in folders.items()
        for path in folder.glob("*/**/*.yaml")
    ]
    for group, rows in itertools.groupby(sorted(options), key=lambda option: option[0]):
        lines += ["", f"## {group}", "", "| option | what it chooses | plugin |", "|---|---|---|"]
        lines += [f"| `{name}` | {_first_comment(path)} | `{plugin}` |" for _, name, plugin, path in rows]
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
        "Guarded changes of upstream at run time, one file a patch: the core's in `patches/`, a plugin's in its own",
        "folder `patches/`. Nothing is patched because embodix is installed: a config's `patches` node, a policy's",
        "record or a verb asks for them, and they are undone at the end of the run.",
    ]
    shipped = [name for name in patch_names() if _plugin_of("host_patches", name) in shipped_plugins()]
    for name in shipped:
        patch = patch_module(name).PATCH
        requires = ", ".join(f"{host}{wanted}" for host, wanted in patch.requires.items())
        plugin = _plugin_of("host_patches", name)
        lines += ["", f"## {name}", "", f"- plugin: `{plugin}`", f"- target: `{patch.target}`"]
        lines.append(f"- holds for: `{requires}`")
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


def upstream_flags_page() -> str:
    """How each flag of upstream's commands is reached."""
    lines = [
        *("# Upstream's flags", "", MARK, ""),
        "What `lerobot-train` and `lerobot-eval` take with two dashes, as an override of `lerobot train` (also of",
        "`compare` and `plan`) and `lerobot eval`. `*` stands for the rest of a name; a field that no chosen option",
        "has takes two pluses (`++policy.chunk_size=20` with `policy=upstream`). A command line of upstream's is",
        "answered by its translation.",
    ]
    for title, table in (("lerobot-train", TRAIN), ("lerobot-eval", EVAL)):
        lines += ["", f"## `{title}`", "", "| flag | override |", "|---|---|"]
        lines += [f"| `--{flag}` | {_reached(flag, line)} |" for flag, line in table.items()]
    return "\n".join(lines) + "\n"


def _reached(flag: str, line: str) -> str:
    """The override, or why there is none."""
    return f"none: {line[2:]}" if line.startswith("-") else f"`{line.replace('{value}', '<value>')}`"


def data_checks_page() -> str:
    """Every kind of finding: the rule, what upstream does, what embodix does."""
    does = {"error": "refuses the run before anything is loaded", "warning": "warns"}
    lines = [
        *("# What is checked of data", "", MARK, ""),
        "`lerobot check [overrides]` looks at the data of the run that the same overrides would train, and",
        "`train`, `compare` and `plan` do so first (`check=error`; `check=warn` goes on, `check=off` believes).",
        "Each finding has a key, a figure, its place (episode, frame, dimension, file) and what to do. What is an",
        "error in every episode (a frozen camera, no motion) is a warning in some. What upstream's LeRobot 0.5.1",
        "does was seen by planting each damage and training on it:",
        "[benchmarks/results/bad_data.md](../benchmarks/results/bad_data.md).",
        *("", "| kind | rule | upstream | embodix |", "|---|---|---|---|"),
    ]
    lines += [f"| `{name}` | {kind.rule} | {kind.upstream} | {does[kind.severity]} |" for name, kind in KINDS.items()]
    lines += [
        "",
        "`dataset.statistics=exact` normalises by statistics of all frames in place of the recorded ones; where a",
        "dimension is (nearly) always the same they are widened, so that what is normalised stays within about 1. They",
        "are computed once, kept by the data's content, and written into the checkpoint as any other.",
        "`dataset.join={<key>: [<key>, ...]}` makes a state or action of several columns.",
    ]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Every generated page by its path in the repository."""
    return {
        "docs/hooks.md": hooks_page(),
        "docs/config-groups.md": config_groups_page(),
        "docs/patches.md": patches_page(),
        "docs/upstream-flags.md": upstream_flags_page(),
        "docs/data-checks.md": data_checks_page(),
    }


if __name__ == "__main__":
    for relative_path, content in pages().items():
        (REPOSITORY / relative_path).write_text(content)
        print(f"wrote {relative_path}")
