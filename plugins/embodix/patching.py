# SPDX-License-Identifier: Apache-2.0
"""Guarded runtime patches of upstream: explicit, version-ranged, applied at most once, undone at the end.

Each patch is one module with a ``PATCH`` record and an ``apply(**options)`` function that returns its own undo,
registered by the hook ``register_host_patches``. Upstream's files are never touched.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from embodix import plugins
from embodix.arguments import typed_arguments


class PatchError(RuntimeError):
    """A patch is unknown, is applied twice with other options, or does not fit the installed host."""


@dataclass(frozen=True)
class Patch:
    """The papers of a patch.

    Attributes:
        name: that of its module and its registration.
        target: the upstream symbol that is replaced.
        requires: distribution -> version range the patch holds for.
        symptom: what goes wrong without it.
        upstream: the upstream thread, or why there is none.
        why_safe: what it leaves unchanged.
        remove_when: the condition under which it can go.
    """

    name: str
    target: str
    requires: Mapping[str, str]
    symptom: str
    upstream: str
    why_safe: str
    remove_when: str

    def version_problem(self) -> str | None:
        """Why the installed versions do not fit, or None."""
        for distribution, wanted in self.requires.items():
            problem = version_problem(distribution, wanted)
            if problem:
                return problem
        return None


def version_problem(distribution: str, wanted: str) -> str | None:
    """Why the installed version of ``distribution`` is outside ``wanted``, or None when it fits."""
    from packaging.specifiers import SpecifierSet

    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"wanted {distribution}{wanted}, found none; install it: pip install '{distribution}{wanted}'"
    if not SpecifierSet(wanted).contains(found, prereleases=True):
        return f"wanted {distribution}{wanted}, found {found}; install it: pip install '{distribution}{wanted}'"
    return None


@dataclass
class _Applied:
    options: dict[str, Any]
    undo: Callable[[], None]
    users: int = 1


_applied: dict[str, _Applied] = {}


def patch_names() -> list[str]:
    """Names of all registered patches."""
    return plugins.registry().names("host_patches")


def patch_module(name: str) -> ModuleType:
    """Import one patch's module.

    Raises:
        PatchError: no such patch; the message lists those that exist.
    """
    if name not in patch_names():
        raise PatchError(f"No patch is called {name!r}; known: {', '.join(patch_names())}.")
    target = plugins.registry().registration("host_patches", name).target
    return importlib.import_module(target.partition(":")[0])


def is_applied(name: str) -> bool:
    return name in _applied


def patch_arguments(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A config's options as the patch takes them.

    Raises:
        PatchError: no such patch.
        embodix.arguments.ArgumentError: an option that it does not take, or a value that is none of its type.
    """
    return typed_arguments(patch_module(name).apply, options, f"patch {name!r}")


def apply_patch(name: str, **options: Any) -> None:
    """Apply a patch; a second request with the same options is counted, not applied again.

    Raises:
        PatchError: unknown patch, host version out of range, or already applied with other options.
        embodix.arguments.ArgumentError: an option that it does not take, or a value that is none of its type.
    """
    module, options = patch_module(name), patch_arguments(name, options)
    current = _applied.get(name)
    if current is not None:
        if current.options != options:
            raise PatchError(
                f"Patch {name!r} is already applied with {current.options}; got {options}. "
                "Undo the first use before asking for other options."
            )
        current.users += 1
        return
    problem = module.PATCH.version_problem()
    if problem:
        raise PatchError(f"Patch {name!r} of {module.PATCH.target} does not fit this host: {problem}.")
    _applied[name] = _Applied(options, module.apply(**options))


def undo_patch(name: str) -> None:
    """Give up one use of a patch; the last one restores upstream."""
    current = _applied.get(name)
    if current is None:
        raise PatchError(f"Patch {name!r} is not applied; applied: {', '.join(sorted(_applied)) or 'none'}.")
    current.users -= 1
    if current.users == 0:
        del _applied[name]
        current.undo()


@contextmanager
def patched(patches: Mapping[str, Mapping[str, Any] | None]) -> Iterator[None]:
    """Apply patches (name -> options) for the duration of a block, in order, and undo them in reverse."""
    with ExitStack() as stack:
        for name, options in patches.items():
            apply_patch(name, **(options or {}))
            stack.callback(undo_patch, name)
        yield


def replace_attribute(owner: Any, attribute: str, replacement: Any) -> Callable[[], None]:
    """Set ``owner.attribute`` and return the function that restores it.

    The restored attribute is the descriptor itself (a class method stays one), and what ``owner`` had inherited
    is inherited again.
    """
    if not hasattr(owner, attribute):
        raise PatchError(f"{owner!r} has no attribute {attribute!r} to replace; the host has changed.")
    inherited = attribute not in vars(owner)
    original = None if inherited else vars(owner)[attribute]
    setattr(owner, attribute, replacement)

    def undo() -> None:
        if inherited:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, original)

    return undo
