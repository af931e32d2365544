# SPDX-License-Identifier: Apache-2.0
"""Collect the state of this installation: plugins, implementations, patches and host versions.

Nothing here raises on a broken part: a finding carries the reason instead, so that one fault hides no other.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from embodix.doctor.machine import AttentionTarget, MachineFinding
from embodix.patching import is_applied, patch_module, patch_names, version_problem
from embodix.plugins import PluginError, PluginRegistry

# Distributions whose versions decide what works, in the order shown. The ranges are read from the metadata of
# embodix, and from lerobot's for what only lerobot asks for.
WATCHED_DISTRIBUTIONS = (
    "lerobot",
    "rlinf",
    "torch",
    "transformers",
    "accelerate",
    "hydra-core",
    "omegaconf",
    "draccus",
    "pluggy",
    "datasets",
    "safetensors",
    "torchcodec",
    "metaworld",
    "mujoco",
    "hf-libero",
    "robosuite",
    "peft",
    "dm-tree",
    "gymnasium",
    "flash-attn",
    "flash-attn-4",
    "torchao",
    "transformer-engine",
    "deepspeed",
    "ray",
)


@dataclass(frozen=True)
class PluginFinding:
    """One entry point; ``error`` is the traceback if it did not load."""

    name: str
    distribution: str
    target: str
    error: str | None


@dataclass(frozen=True)
class ImplementationFinding:
    """One registered implementation; ``problem`` says why it can't be used here."""

    kind: str
    name: str
    plugin: str
    target: str
    summary: str
    problem: str | None


@dataclass(frozen=True)
class PatchFinding:
    """One patch of upstream; ``problem`` says why it does not fit the installed host."""

    name: str
    target: str
    requires: dict[str, str]
    applied: bool
    problem: str | None


@dataclass(frozen=True)
class VersionFinding:
    """One watched distribution. ``required`` is False for what only an extra asks for."""

    distribution: str
    wanted: str
    found: str | None
    required: bool
    problem: str | None


@dataclass
class Diagnosis:
    """Everything found; ``needs`` lists what the given config needs and lacks."""

    plugins: list[PluginFinding] = field(default_factory=list)
    implementations: list[ImplementationFinding] = field(default_factory=list)
    patches: list[PatchFinding] = field(default_factory=list)
    versions: list[VersionFinding] = field(default_factory=list)
    machine: MachineFinding | None = None
    overrides: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)


def find_plugins(registry: PluginRegistry) -> list[PluginFinding]:
    """Every entry point, healthy or broken."""
    return [PluginFinding(r.name, r.distribution, r.target, r.error) for r in registry.plugins]


def find_implementations(registry: PluginRegistry, target: AttentionTarget) -> list[ImplementationFinding]:
    """Every registration of every plugin, imported; attention backends are tried on ``target`` too."""
    findings = []
    for kind, registrations in registry.implementations.items():
        for name, registration in registrations.items():
            problem = implementation_problem(registry, kind, name, target)
            plugin = registry.providers[kind, name]
            findings.append(
                ImplementationFinding(kind, name, plugin, registration.target, registration.summary, problem)
            )
    return findings


def implementation_problem(registry: PluginRegistry, kind: str, name: str, target: AttentionTarget) -> str | None:
    """Why an implementation can't be used, or None.

    Attention backends are probed and checked against fp32; policies name the host versions they support;
    precisions say what they lack, and why they would be emulated.
    """
    try:
        implementation = registry.resolve(kind, name)
        if kind == "attention_backends":
            reason = target.problem_of(implementation())
            return reason and f"can't run on {target}: {reason}"
        if kind == "precisions":
            missing, reason = implementation.needs(), target.emulation_reason(implementation)
            return missing or (reason and f"emulated on {target.device}: {reason}")
        if kind == "policies":
            problems = (version_problem(host, wanted) for host, wanted in implementation.supported.items())
            return next(filter(None, problems), None)
    except PluginError as error:
        return f"cannot import: {error.__cause__ or error}"
    except Exception as error:
        return f"broken: {type(error).__name__}: {error}"
    return None


def find_patches() -> list[PatchFinding]:
    """Every patch that ships with embodix."""
    findings = []
    for name in patch_names():
        try:
            patch = patch_module(name).PATCH
        except Exception as error:
            findings.append(PatchFinding(name, "?", {}, False, f"cannot import: {type(error).__name__}: {error}"))
            continue
        findings.append(
            PatchFinding(name, patch.target, dict(patch.requires), is_applied(name), patch.version_problem())
        )
    return findings


def find_versions() -> list[VersionFinding]:
    """The watched distributions, with the ranges that embodix (or lerobot) asks for."""
    ranges = _wanted_ranges()
    findings = []
    for name in WATCHED_DISTRIBUTIONS:
        wanted, required = ranges.get(name, ("", False))
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = None
        problem = version_problem(name, wanted) if found or required else None
        findings.append(VersionFinding(name, wanted, found, required, problem))
    return findings


def _wanted_ranges() -> dict[str, tuple[str, bool]]:
    """Distribution -> (version range, whether a plain install of embodix needs it)."""
    ranges: dict[str, tuple[str, bool]] = {}
    extras_of_lerobot: set[str] = set()
    for requirement in _requirements_of("embodix"):
        name = canonicalize_name(requirement.name)
        required = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if name == "lerobot" and required:
            extras_of_lerobot = set(requirement.extras)
        known = ranges.get(name)
        if known is None or (required and not known[1]):
            ranges[name] = (str(requirement.specifier), required)
    for requirement in _requirements_of("lerobot"):
        marker: Any = requirement.marker
        asked = marker is None or any(marker.evaluate({"extra": extra}) for extra in extras_of_lerobot | {""})
        if asked:
            ranges.setdefault(canonicalize_name(requirement.name), (str(requirement.specifier), True))
    return ranges


def _requirements_of(distribution: str) -> Iterator[Requirement]:
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    yield from map(Requirement, lines)
