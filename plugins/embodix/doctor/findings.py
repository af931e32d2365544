# SPDX-License-Identifier: Apache-2.0
"""Collect the state of this installation: plugins, implementations, patches, simulators, host versions, the machine.

Nothing here raises on a broken part: a finding carries the reason instead, so that one fault hides no other.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from embodix.contracts import SimulatorStatus, TellsNeeds, TellsStatus
from embodix.patching import is_applied, patch_module, patch_names, version_problem
from embodix.plugins import FAILURES, PluginError, PluginRegistry
from embodix.simulation.egl_devices import describe_egl_devices
from embodix.simulation.rendering import GL_BACKENDS, probe_gl_backend

# Distributions of the hosts, in the order shown; what embodix's extras ask for follows. The ranges are read from the
# metadata of embodix, and from lerobot's for what only lerobot asks for.
HOST_DISTRIBUTIONS = (
    "lerobot",
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
    "gymnasium",
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


@dataclass(frozen=True)
class MachineFinding:
    """``rendering`` maps an off-screen backend of MuJoCo to the reason it can't render, None when it can;
    ``egl_devices`` says in words which EGL device is which CUDA device."""

    python: str
    system: str
    cpu: str
    num_cores: int
    memory_gib: float
    gpus: list[str] = field(default_factory=list)
    gpu_problem: str | None = None
    rendering: dict[str, str | None] = field(default_factory=dict)
    egl_devices: str = ""


@dataclass(frozen=True)
class AttentionTarget:
    """Where attention is to run; the default head size stands for a policy that does not say its own."""

    device: str
    dtype: str
    head_dim: int = 256

    def problem_of(self, backend: Any) -> str | None:
        """Why the backend can't run here (its probe's reason, or a self-check that disagrees), or None."""
        import torch

        from embodix.attention.select import backend_problem

        return backend_problem(backend, torch.device(self.device), getattr(torch, self.dtype), self.head_dim)

    def emulation_reason(self, precision: Any) -> str | None:
        """Why a training precision would be emulated on this device, or None."""
        import torch

        reason: str | None = precision.probe(torch.device(self.device))
        return reason

    def __str__(self) -> str:
        return f"{self.device}, {self.dtype}, head_dim {self.head_dim}"


@dataclass
class Diagnosis:
    """Everything found; ``environments`` are those that tell, ``needs`` lists what the given config needs and lacks."""

    plugins: list[PluginFinding] = field(default_factory=list)
    implementations: list[ImplementationFinding] = field(default_factory=list)
    patches: list[PatchFinding] = field(default_factory=list)
    versions: list[VersionFinding] = field(default_factory=list)
    machine: MachineFinding | None = None
    environments: dict[str, SimulatorStatus] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)


def default_target() -> AttentionTarget:
    """The first GPU in bfloat16, or the CPU in float32."""
    return AttentionTarget("cpu", "float32") if gpu_problem() else AttentionTarget("cuda", "bfloat16")


def gpu_problem() -> str | None:
    """Why torch sees no CUDA device, or None."""
    try:
        import torch
    except Exception as error:
        return f"torch cannot be imported: {type(error).__name__}: {error}"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


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
    precisions say what they lack, and why they would be emulated; parallel strategies what they lack.
    """
    try:
        implementation = registry.resolve(kind, name)
        if kind == "attention_backends":
            reason = target.problem_of(implementation())
            return reason and f"can't run on {target}: {reason}"
        if kind == "precisions":
            missing, reason = implementation.needs(), target.emulation_reason(implementation)
            return missing or (reason and f"emulated on {target.device}: {reason}")
        if kind == "parallel_strategies" and isinstance(implementation, TellsNeeds):
            return implementation.needs()
        if kind == "policies":
            problems = (version_problem(host, wanted) for host, wanted in implementation.supported.items())
            return next(filter(None, problems), None)
    except PluginError as error:
        return f"cannot import: {error.__cause__ or error}"
    except FAILURES as error:
        return f"broken: {type(error).__name__}: {error}"
    return None


def find_patches() -> list[PatchFinding]:
    """Every patch that ships with embodix."""
    findings = []
    for name in patch_names():
        try:
            patch = patch_module(name).PATCH
        except FAILURES as error:
            findings.append(PatchFinding(name, "?", {}, False, f"cannot import: {type(error).__name__}: {error}"))
            continue
        findings.append(
            PatchFinding(name, patch.target, dict(patch.requires), is_applied(name), patch.version_problem())
        )
    return findings


def find_environments(registry: PluginRegistry) -> dict[str, SimulatorStatus]:
    """What registered environments tell of their simulators."""
    found = {}
    for name in registry.names("environments"):
        try:
            environment = registry.resolve("environments", name)
        except PluginError:  # the implementations say so
            continue
        if isinstance(environment, TellsStatus):
            try:
                found[name] = environment.status()
            except FAILURES as error:
                found[name] = SimulatorStatus("", f"broken: {type(error).__name__}: {error}")
    return found


def find_versions() -> list[VersionFinding]:
    """Distributions whose versions decide what works, with the ranges that embodix (or lerobot) asks for."""
    ranges = _wanted_ranges()
    findings = []
    for name in _watched_distributions():
        wanted, required = ranges.get(name, ("", False))
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = None
        problem = version_problem(name, wanted) if found or required else None
        findings.append(VersionFinding(name, wanted, found, required, problem))
    return findings


def _watched_distributions() -> list[str]:
    """The hosts', and what embodix's extras ask for, through lerobot's extras too."""
    names = dict.fromkeys(HOST_DISTRIBUTIONS)
    for requirement in _requirements_of("embodix"):
        if _is_of_a_plain_install(requirement) or _is_of_extra(requirement, "dev"):
            continue
        names[canonicalize_name(requirement.name)] = None
        if requirement.name == "lerobot":
            further = [r for r in _requirements_of("lerobot") if not _is_of_a_plain_install(r)]
            asked = [r for r in further if any(_is_of_extra(r, extra) for extra in requirement.extras)]
            names |= dict.fromkeys(canonicalize_name(r.name) for r in asked)
    return list(names)


def _is_of_a_plain_install(requirement: Requirement) -> bool:
    return _is_of_extra(requirement, "")


def _is_of_extra(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _wanted_ranges() -> dict[str, tuple[str, bool]]:
    """Distribution -> (version range, whether a plain install of embodix needs it)."""
    ranges: dict[str, tuple[str, bool]] = {}
    extras_of_lerobot: set[str] = set()
    for requirement in _requirements_of("embodix"):
        name = canonicalize_name(requirement.name)
        required = _is_of_a_plain_install(requirement)
        if name == "lerobot" and required:
            extras_of_lerobot = set(requirement.extras)
        known = ranges.get(name)
        if known is None or (required and not known[1]):
            ranges[name] = (str(requirement.specifier), required)
    for requirement in _requirements_of("lerobot"):
        if any(_is_of_extra(requirement, extra) for extra in extras_of_lerobot | {""}):
            ranges.setdefault(canonicalize_name(requirement.name), (str(requirement.specifier), True))
    return ranges


def _requirements_of(distribution: str) -> Iterator[Requirement]:
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    yield from map(Requirement, lines)


def inspect_machine() -> MachineFinding:
    """Look at this machine; renders one tiny image a backend, in processes of their own."""
    problem = gpu_problem()
    return MachineFinding(
        python=f"{platform.python_version()} ({sys.executable})",
        system=platform.platform(),
        cpu=_cpu_name(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        gpus=[] if problem else _gpu_names(),
        gpu_problem=problem,
        rendering={backend: probe_gl_backend(backend) for backend in GL_BACKENDS},
        egl_devices=describe_egl_devices(),
    )


def _gpu_names() -> list[str]:
    import torch

    return [
        f"{p.name}, {p.total_memory / 2**30:.0f} GiB, compute capability {p.major}.{p.minor}"
        for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
