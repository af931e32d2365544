# SPDX-License-Identifier: Apache-2.0
"""Load, list, validate and resolve plugins: lazy, listed, loud, one entry point at a time.

pluggy's own ``load_setuptools_entrypoints`` stops at the first entry point that fails to import, so that one
broken plugin hides the healthy ones. Here every entry point is tried on its own; a failure is kept with its
traceback, shown by ``embodix doctor``, and raised when something that a run asks for may have been lost by it.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import re
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pluggy

from embodix.arguments import typed_arguments
from embodix.hookspecs import PROJECT_NAME, EmbodixSpec, Registration, hook_names

ENTRY_POINT_GROUP = "embodix"
TARGET = re.compile(r"[\w.]+:\w+")
FAILURES = (Exception, SystemExit)
"""What the code of a plugin may fail with: some packages call sys.exit where they are imported."""


class PluginError(ValueError):
    """A plugin is broken, or a name asked for is unknown or registered twice."""


@dataclass(frozen=True)
class PluginRecord:
    """One entry point as found: where it comes from, and the traceback if it did not load."""

    name: str
    distribution: str
    target: str
    error: str | None = None

    @property
    def healthy(self) -> bool:
        return self.error is None


@dataclass
class PluginRegistry:
    """All loaded plugins and what they registered, by kind.

    ``implementations`` maps a kind (``packers``, ``attention_backends``, ...) to its registrations by name.
    """

    plugins: list[PluginRecord] = field(default_factory=list)
    implementations: dict[str, dict[str, Registration]] = field(default_factory=dict)
    providers: dict[tuple[str, str], str] = field(default_factory=dict)

    def broken(self) -> list[PluginRecord]:
        return [record for record in self.plugins if not record.healthy]

    def names(self, kind: str) -> list[str]:
        return sorted(self._of_kind(kind))

    def registration(self, kind: str, name: str) -> Registration:
        """The registration called ``name``.

        Raises:
            PluginError: unknown kind or name; the message lists what exists, the nearest match and every
                plugin that failed to load.
        """
        known = self._of_kind(kind)
        if name in known:
            return known[name]
        message = f"No {_singular(kind)} is called {name!r}; known: {', '.join(sorted(known)) or 'none'}."
        nearest = difflib.get_close_matches(name, known, n=1)
        if nearest:
            message += f" Did you mean {nearest[0]!r}?"
        for record in self.broken():
            message += f"\nPlugin {record.name!r} ({record.distribution}) failed to load: {_last_line(record.error)}"
        raise PluginError(message)

    def resolve(self, kind: str, name: str) -> Any:
        """Import and return the implementation called ``name``.

        Raises:
            PluginError: unknown name, or the target cannot be imported (the cause is chained).
        """
        registration = self.registration(kind, name)
        module_name, _, attribute = registration.target.partition(":")
        try:
            return getattr(importlib.import_module(module_name), attribute)
        except FAILURES as error:
            raise PluginError(
                f"{_singular(kind)} {name!r} of plugin {self.providers[kind, name]!r} cannot be imported from "
                f"{registration.target}: {type(error).__name__}: {error}. "
                "Install what it needs, or choose another with its Hydra group."
            ) from error

    def build(self, kind: str, name: str, options: Mapping[str, Any]) -> Any:
        """An instance of the implementation called ``name`` with a config's options.

        Raises:
            PluginError: unknown name, or a target that cannot be imported.
            embodix.arguments.ArgumentError: see `arguments`.
        """
        return self.resolve(kind, name)(**self.arguments(kind, name, options))

    def arguments(self, kind: str, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """A config's options as the implementation called ``name`` takes them: `no` as False where it wants a bool.

        Raises:
            PluginError: unknown name, or a target that cannot be imported.
            embodix.arguments.ArgumentError: an option that it does not take, or a value that is none of its type.
        """
        return typed_arguments(self.resolve(kind, name), options, f"{_singular(kind)} {name!r}")

    def resolve_all(self, kind: str) -> dict[str, Any]:
        """Import every implementation of a kind, by name."""
        return {name: self.resolve(kind, name) for name in self.names(kind)}

    def require_healthy(self) -> None:
        """Stop when any plugin failed to load, because what it would have registered is unknown.

        Raises:
            PluginError: with every broken plugin's traceback.
        """
        broken = self.broken()
        if broken:
            details = "\n\n".join(f"{r.name!r} from {r.distribution} ({r.target}):\n{r.error}" for r in broken)
            raise PluginError(
                f"{len(broken)} plugin(s) failed to load, so the run is refused. Repair or uninstall them, or run "
                f"with strict_plugins=false to leave them out.\n{details}"
            )

    def _of_kind(self, kind: str) -> dict[str, Registration]:
        if f"register_{kind}" not in hook_names():
            kinds = ", ".join(name.removeprefix("register_") for name in hook_names())
            raise PluginError(f"Unknown kind of implementation {kind!r}; kinds: {kinds}.")
        return self.implementations.get(kind, {})


def _singular(kind: str) -> str:
    singular = f"{kind.removesuffix('ies')}y" if kind.endswith("ies") else kind.removesuffix("s")
    return {"host_patches": "patch"}.get(kind, singular.replace("_", " "))


def _last_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[-1] if text else ""


def load_plugins(entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> PluginRegistry:
    """Load every entry point of the group on its own and collect what it registers.

    A plugin that breaks a rule is left out whole and kept as a broken record; it hides no other.

    Args:
        entry_points: the entry points to load; default: those installed under the group ``embodix``.
    """
    registry = PluginRegistry(implementations={name.removeprefix("register_"): {} for name in hook_names()})
    if entry_points is None:
        entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    for entry_point in sorted(entry_points, key=lambda ep: (ep.name != "builtin", ep.name)):
        _load_one(registry, entry_point)
    return registry


def _load_one(registry: PluginRegistry, entry_point: importlib.metadata.EntryPoint) -> None:
    distribution = _named(entry_point.dist) if entry_point.dist else "unknown"
    try:
        found = _registrations_of(entry_point)
        _require_new_names(registry, found, entry_point.name)
    except FAILURES:
        record = PluginRecord(entry_point.name, distribution, entry_point.value, traceback.format_exc())
        registry.plugins.append(record)
        return
    registry.plugins.append(PluginRecord(entry_point.name, distribution, entry_point.value))
    for kind, registrations in found.items():
        registry.implementations[kind] |= {registration.name: registration for registration in registrations}
        registry.providers |= {(kind, registration.name): entry_point.name for registration in registrations}


@functools.cache  # each access to the name or version of a distribution reads its metadata anew
def _named(distribution: importlib.metadata.Distribution) -> str:
    metadata = distribution.metadata
    return f"{metadata['Name']} {metadata['Version']}"


def _registrations_of(entry_point: importlib.metadata.EntryPoint) -> dict[str, list[Registration]]:
    """Import one plugin into a manager of its own, validate its hooks and call them."""
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(EmbodixSpec)
    manager.register(entry_point.load(), name=entry_point.name)
    manager.check_pending()
    found: dict[str, list[Registration]] = {}
    for hook_name in hook_names():
        # Called one by one: pluggy leaves out a hook that returns None.
        for implementation in getattr(manager.hook, hook_name).get_hookimpls():
            registrations = _checked(hook_name, implementation.function())
            found.setdefault(hook_name.removeprefix("register_"), []).extend(registrations)
    return found


def _checked(hook_name: str, returned: Any) -> list[Registration]:
    """What a hook returned.

    Raises:
        PluginError: it is no list of sound registrations.
    """
    if not isinstance(returned, list | tuple):
        raise PluginError(f"{hook_name} must return a list of embodix.Registration; got {returned!r}.")
    for registration in returned:
        if not isinstance(registration, Registration) or not TARGET.fullmatch(str(registration.target)):
            raise PluginError(
                f"{hook_name} must return embodix.Registration records whose target reads "
                f"'package.module:attribute'; got {registration!r}."
            )
        if not isinstance(registration.name, str) or not registration.name:
            raise PluginError(f"{hook_name} must return registrations with a name; got {registration!r}.")
        if hook_name == "register_config_packages":
            _require_package(registration.target.partition(":")[0])
    return list(returned)


def _require_package(package: str) -> None:
    """Hydra looks for every config in all packages, so one that is not there would stop every command."""
    if importlib.util.find_spec(package) is None:
        raise PluginError(f"register_config_packages must name packages that are there; {package!r} is not.")


def _require_new_names(registry: PluginRegistry, found: Mapping[str, list[Registration]], plugin: str) -> None:
    for kind, registrations in found.items():
        seen: set[str] = set()
        for name in (registration.name for registration in registrations):
            earlier = plugin if name in seen else registry.providers.get((kind, name))
            if earlier is not None:
                raise PluginError(
                    f"{_singular(kind)} {name!r} is registered by both {earlier!r} and {plugin!r}, so {plugin!r} is "
                    f"left out; uninstall one of them or rename. Known: {', '.join(registry.names(kind))}."
                )
            seen.add(name)


@functools.cache
def registry() -> PluginRegistry:
    """The process-wide registry, loaded on first use."""
    return load_plugins()


def resolve(kind: str, name: str) -> Any:
    """Import and return the implementation ``name`` of ``kind`` from the process-wide registry."""
    return registry().resolve(kind, name)


def build(kind: str, name: str, options: Mapping[str, Any]) -> Any:
    """An instance of the implementation ``name`` of ``kind`` from the process-wide registry."""
    return registry().build(kind, name, options)
