# SPDX-License-Identifier: Apache-2.0
"""Where a run came from: code, versions, machine, configuration and what was in use.

Every run folder and every benchmark result carries this record, so that a figure can be traced and repeated.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import embodix

_ALWAYS = ("embodix", "lerobot", "torch", "transformers", "accelerate", "numpy", "hydra-core")
# Instruction sets that decide how fast fp32, bf16 and int8 matrix products run on a CPU.
_MATRIX_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
# Results do not take part in the computation, so writing one must not make the tree dirty for the next.
RESULTS_FOLDER = "benchmarks/results"


@dataclass(frozen=True)
class Provenance:
    """Code and machine of a run.

    Attributes:
        commit: git commit of embodix, or ``version X`` where embodix was installed without one.
        commit_source: how ``commit`` was found, in words.
        dirty: whether tracked or new files differed from the commit; None where there is no checkout to ask.
        versions: installed packages that matter, by distribution name.
        python: interpreter version.
        os: operating system and kernel.
        cpu: processor model.
        cpu_instructions: the matrix-related instruction sets it offers.
        num_cores: logical cores this process may use.
        num_threads: torch's intra-op threads; None where torch was not in use.
        gpu: names of the CUDA devices; empty where torch sees none or was not in use.
    """

    commit: str
    commit_source: str
    dirty: bool | None
    versions: dict[str, str]
    python: str
    os: str
    cpu: str
    cpu_instructions: list[str]
    num_cores: int
    num_threads: int | None
    gpu: list[str]


@dataclass(frozen=True)
class Manifest:
    """What one run was.

    Attributes:
        variant: name of the run in comparisons, e.g. ``upstream`` or ``embodix``.
        created_at: time of the record, UTC, ISO 8601.
        provenance: code and machine.
        seed: the run's seed.
        config: the resolved Hydra configuration.
        packer: which prefix tokens are computed, e.g. ``none`` or ``padding_free``.
        attention: the attention backend that is really in use, after ``auto`` has chosen.
        settings: further switches in use, e.g. what the policy wrapper says of itself.
        patches: patches of upstream in force.
        fallbacks: what could not be used and what was used instead, one sentence each.
        flops_per_step: mean floating-point operations of one step (forward and backward) as torch's counter sees
            them, or None when not counted.
        peak_memory_bytes: the highest memory in use, or None when not measured.
        peak_memory_source: what was measured, e.g. ``CUDA allocator`` or ``resident set of the process``.
        num_parameters: parameters of the policy as built, or None when not counted.
        reference_check: how the losses compare with the reference where upstream's own batch is not it, see
            ``embodix.report.runs.ReferenceDifference``; None where upstream's batch is the reference.
        notes: anything a reader of the report must know.
    """

    variant: str
    created_at: str
    provenance: Provenance
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    packer: str | None = None
    attention: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    patches: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    flops_per_step: float | None = None
    peak_memory_bytes: int | None = None
    peak_memory_source: str | None = None
    num_parameters: int | None = None
    reference_check: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    def save(self, path: Path | str) -> None:
        """Write the manifest as JSON, beside and renamed."""
        write_text_atomically(Path(path), json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    def replace(self, **changes: Any) -> Manifest:
        """A copy with some fields changed, for what is known only after training."""
        return dataclasses.replace(self, **changes)


def collect_manifest(
    variant: str,
    *,
    seed: int | None = None,
    config: Mapping[str, Any] | None = None,
    packer: str | None = None,
    attention: str | None = None,
    settings: Mapping[str, Any] | None = None,
    patches: Iterable[str] = (),
    fallbacks: Iterable[str] = (),
    **measured: Any,
) -> Manifest:
    """Describe the run of this process; see :class:`Manifest` for the arguments.

    Args:
        config: plain containers (``OmegaConf.to_container(..., resolve=True)``).
        measured: ``flops_per_step``, ``peak_memory_bytes``, ``peak_memory_source``, ``num_parameters``,
            ``reference_check``, ``notes``.
    """
    return Manifest(
        variant=variant,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        provenance=collect_provenance(),
        seed=seed,
        config=dict(config or {}),
        packer=packer,
        attention=attention,
        settings=dict(settings or {}),
        patches=list(patches),
        fallbacks=list(fallbacks),
        **measured,
    )


def load_manifest(path: Path | str) -> Manifest:
    """Read a manifest.

    Raises:
        FileNotFoundError: no such file; the message says what writes it.
        ValueError: the file is not a manifest.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"No manifest at {path}. `lerobot train` writes manifest.json into its output_dir; give such a folder."
        )
    try:
        fields = json.loads(path.read_text())
        return Manifest(**{**fields, "provenance": Provenance(**fields["provenance"])})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a run manifest of this version ({type(error).__name__}: {error}). "
            "Train the run again, or read it with the embodix version that wrote it."
        ) from error


def collect_provenance() -> Provenance:
    """Describe the code and the machine. Asks torch only where the process already uses it."""
    commit, source, dirty = _find_commit()
    torch = sys.modules.get("torch")
    return Provenance(
        commit=commit,
        commit_source=source,
        dirty=dirty,
        versions=_installed_versions(),
        python=platform.python_version(),
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_field("model name") or platform.processor() or platform.machine(),
        cpu_instructions=_matrix_instructions(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_threads=torch.get_num_threads() if torch else None,
        gpu=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch else [],
    )


def _installed_versions() -> dict[str, str]:
    """Of what every run uses, of plugins' distributions, and of what embodix's optional features bring."""
    found = {}
    plugins = sorted(point.dist.name for point in importlib.metadata.entry_points(group="embodix") if point.dist)
    for name in dict.fromkeys((*_ALWAYS, *plugins, *_optional_requirements())):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _optional_requirements() -> list[str]:
    """Distributions that embodix's extras ask for, where an extra widens a dependency (``host[simulator]``) too.

    What the extra ``dev`` asks for takes no part in a computation.
    """
    always, optional = [], []
    for requirement in _requirements_of("embodix"):
        if requirement.marker is None or "extra" not in str(requirement.marker):
            always.append(requirement.name)
        elif not requirement.marker.evaluate({"extra": "dev"}):
            optional.append(requirement)
    widened = [requirement for requirement in optional if requirement.name in always]
    return [
        *(requirement.name for requirement in optional),
        *(
            part.name
            for requirement in widened
            for part in _requirements_of(requirement.name)
            if part.marker and "extra" in str(part.marker)
            if any(part.marker.evaluate({"extra": extra}) for extra in requirement.extras)
        ),
    ]


def _requirements_of(name: str) -> list[Requirement]:
    try:
        return [Requirement(line) for line in importlib.metadata.requires(name) or ()]
    except importlib.metadata.PackageNotFoundError:
        return []


def _find_commit() -> tuple[str, str, bool | None]:
    """Commit, how it was found, and whether the tree was dirty."""
    checkout = Path(embodix.__file__).resolve().parents[2]
    # A virtual environment inside some other repository must not pass for that repository's commit.
    if _git(checkout, "rev-parse", "--show-toplevel") == str(checkout) and (checkout / "pyproject.toml").is_file():
        commit = _git(checkout, "rev-parse", "HEAD")
        if commit:
            changes = _git(checkout, "status", "--porcelain", "--", ".", f":(exclude){RESULTS_FOLDER}")
            return commit, "git checkout", bool(changes)
    commit = _commit_of_installation()
    if commit:
        return commit, "recorded by pip when embodix was installed from git", False
    return f"version {embodix.__version__}", "installed package without a commit; its version stands in", None


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command, or None where git is missing or refuses."""
    try:
        done = subprocess.run(("git", "-C", str(folder), *arguments), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _commit_of_installation() -> str | None:
    """The commit in PEP 610's direct_url.json, present after ``pip install git+https://...``."""
    try:
        text = importlib.metadata.distribution("embodix").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    commit = json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
    return str(commit) if commit else None


def _cpu_field(name: str) -> str | None:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return None
    for line in cpuinfo.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _matrix_instructions() -> list[str]:
    flags = set((_cpu_field("flags") or _cpu_field("Features") or "").split())
    return [name for name in _MATRIX_INSTRUCTIONS if name in flags]


def write_text_atomically(path: Path, text: str) -> None:
    """Write beside and rename, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
