# SPDX-License-Identifier: Apache-2.0
"""RLinf's extension module (``RLINF_EXT_MODULE``): what makes a process of RLinf one of embodix's.

RLinf only logs an extension that can't be imported. So every worker reports what is in force in its process, and a run
whose workers don't agree with it does not start (`require_reports`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from embodix import __version__
from embodix.patching import apply_patch, is_applied
from embodix_rl.report.spans import TimelineWriter
from embodix_rl.rlinf.hosts import WorkersDifferError
from embodix_rl.rlinf.task_config import FLOW_MODEL, LATENCY_MODEL

MODULE = __name__
COMMON_PATCHES = ("rlinf_cpu_platform",)
# A patch imports what it patches, so a process gets those of its role only.
ROLE_PATCHES = {
    "driver": ("rlinf_transformers5", "rlinf_async_reward"),
    "env": ("rlinf_environment_registry",),
    "rollout": ("rlinf_transformers5",),
    "actor": ("rlinf_transformers5", "rlinf_masked_normalization", "rlinf_async_device"),
}
_roles: set[str] = set()
_registered: list[str] = []


@dataclass(frozen=True)
class WorkerReport:
    """What is in force in one worker process.

    Attributes:
        group: RLinf's name of the worker group.
        rank: in the group.
        version: of embodix.
        patches: in force.
        models: model types that embodix registered with RLinf.
        extension: module that RLinf was told to load.
        host: machine.
        pid: process.
        num_threads: of torch.
        device: the type of torch's device.
    """

    group: str
    rank: int
    version: str
    patches: list[str]
    models: list[str]
    extension: str | None
    host: str
    pid: int
    num_threads: int
    device: str


def build_latency_policy(cfg: Any, torch_dtype: Any) -> Any:
    """The policy with declared times."""
    from embodix_rl.rlinf.latency_policy import LatencyPolicy

    return LatencyPolicy.of(cfg)


def build_flow_policy(cfg: Any, torch_dtype: Any) -> Any:
    """A flow-matching policy of LeRobot."""
    from embodix_rl.rlinf.flow_model import build_flow_model

    return build_flow_model(cfg)


MODEL_BUILDERS: dict[str, Callable[[Any, Any], Any]] = {
    LATENCY_MODEL: build_latency_policy,
    FLOW_MODEL: build_flow_policy,
}


def register() -> None:
    """RLinf calls it in every worker. Its channels have no role in the run: they stay as they are and start sooner."""
    if _roles:
        register_models()


def register_models() -> None:
    """Make embodix's models known to RLinf in this process; the driver needs it before RLinf checks the config."""
    from rlinf.models import register_model

    for model_type, builder in MODEL_BUILDERS.items():
        if model_type not in _registered:
            register_model(model_type, builder)
            _registered.append(model_type)


def activate(role: str) -> None:
    """Apply the patches of a role, before its part of RLinf is imported. Worker modules call it first.

    Raises:
        embodix.patching.PatchError: RLinf has another version.
    """
    _roles.add(role)
    for name in (*COMMON_PATCHES, *ROLE_PATCHES[role]):
        _apply_once(name)


def all_patches() -> list[str]:
    """Every patch of RLinf, in the order of the roles."""
    return list(dict.fromkeys([*COMMON_PATCHES, *(name for names in ROLE_PATCHES.values() for name in names)]))


def _apply_once(name: str) -> None:
    if not is_applied(name):  # a worker process keeps its patches until it ends
        apply_patch(name)


def report(group: str, rank: int, device: str) -> dict[str, Any]:
    """This process's report, as plain containers."""
    import torch

    names = all_patches()
    return asdict(
        WorkerReport(
            group=group,
            rank=rank,
            version=__version__,
            patches=[name for name in names if is_applied(name)],
            models=list(_registered),
            extension=os.environ.get("RLINF_EXT_MODULE"),
            host=socket.gethostname(),
            pid=os.getpid(),
            num_threads=torch.get_num_threads(),
            device=device,
        )
    )


class ReportingWorker:
    """Mixin for RLinf's workers: what is in force, and a timeline of what they do."""

    def embodix_report(self) -> dict[str, Any]:
        """A `WorkerReport` as plain containers."""
        worker: Any = self
        return report(worker._group_name, worker._rank, str(worker.torch_device_type))

    def timeline_span(self, activity: str) -> AbstractContextManager[None]:
        """Record what a block takes."""
        return self._timeline.span(activity)

    @cached_property
    def _timeline(self) -> TimelineWriter:
        worker: Any = self
        return TimelineWriter(worker.cfg.embodix.timeline, f"{worker._group_name}:{worker._rank}")


def require_reports(reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[WorkerReport]:
    """Check every worker's report.

    Args:
        reports: role -> the reports of its workers.

    Returns:
        All reports.

    Raises:
        WorkersDifferError: a worker without embodix, with another version, or without its patches or models; the
            message names each and what to do.
    """
    checked = [(role, WorkerReport(**fields)) for role, of_role in reports.items() for fields in of_role]
    faults = [fault for role, found in checked for fault in _faults(role, found)]
    if faults:
        raise WorkersDifferError(
            f"{len(faults)} fault(s) in worker processes, so the run does not start: {'; '.join(faults)}. Install the "
            "same embodix on every node, in the environment that Ray starts workers in, and leave RLINF_EXT_MODULE to "
            "the run."
        )
    return [found for _, found in checked]


def _faults(role: str, found: WorkerReport) -> list[str]:
    worker = f"{found.group}:{found.rank} on {found.host}"
    faults = []
    if found.version != __version__:
        faults.append(f"{worker} has embodix {found.version}, the run {__version__}")
    if found.extension != MODULE:
        faults.append(f"{worker} was told to load {found.extension!r} as extension, not {MODULE!r}")
    if not found.models:
        faults.append(f"{worker} did not register embodix's models (RLinf logs why it could not import the extension)")
    lacking = [name for name in (*COMMON_PATCHES, *ROLE_PATCHES[role]) if name not in found.patches]
    if lacking:
        faults.append(f"{worker} lacks the patches {', '.join(lacking)}")
    return faults
