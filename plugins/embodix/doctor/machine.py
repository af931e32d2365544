# SPDX-License-Identifier: Apache-2.0
"""What this machine offers: interpreter, CPU, GPUs, off-screen rendering."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from embodix_libero.setup import inspect_libero

RENDERING_BACKENDS = ("egl", "osmesa")
_RENDER_SCRIPT = """
import mujoco
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 16, 16) as renderer:
    renderer.update_scene(data)
    renderer.render()
"""


@dataclass(frozen=True)
class MachineFinding:
    """``rendering`` maps an off-screen backend of MuJoCo to the reason it can't render, None when it can.

    ``libero`` says which LIBERO is set up and where its assets are from; ``libero_problem`` why it can't run, or None.
    """

    python: str
    system: str
    cpu: str
    num_cores: int
    memory_gib: float
    gpus: list[str] = field(default_factory=list)
    gpu_problem: str | None = None
    rendering: dict[str, str | None] = field(default_factory=dict)
    libero: str = ""
    libero_problem: str | None = None


@dataclass(frozen=True)
class AttentionTarget:
    """Where attention is to run; ``head_dim`` 256 is π0.5's."""

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


def inspect_machine() -> MachineFinding:
    """Look at this machine; renders one tiny image a backend, in processes of their own."""
    problem = gpu_problem()
    libero = inspect_libero()
    return MachineFinding(
        python=f"{platform.python_version()} ({sys.executable})",
        system=platform.platform(),
        cpu=_cpu_name(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        gpus=[] if problem else _gpu_names(),
        gpu_problem=problem,
        rendering={backend: rendering_problem(backend) for backend in RENDERING_BACKENDS},
        libero=f"hf-libero {libero.version}, assets from {libero.origin or 'nowhere'}" if libero.version else "",
        libero_problem=libero.problem,
    )


def rendering_problem(backend: str) -> str | None:
    """Why MuJoCo can't render off-screen with this backend (``MUJOCO_GL``), or None.

    A process of its own, because MuJoCo chooses its backend once, at import, and a broken driver may crash.
    """
    environment = os.environ | {"MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend}
    try:
        result = subprocess.run(
            [sys.executable, "-c", _RENDER_SCRIPT], env=environment, capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        return "rendering one image took more than 120 s"
    if result.returncode == 0:
        return None
    errors = [line for line in result.stderr.strip().splitlines() if line and not line.startswith(" ")]
    named = [line for line in errors if "Error" in line.split(":")[0]]
    return (named or errors or [f"the process ended with code {result.returncode}"])[0]


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
