# SPDX-License-Identifier: Apache-2.0
"""What RLinf's GPU simulators need and lack on this machine, found by trying it in processes of their own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable

from embodix.patching import version_problem

RLINF_VERSIONS = ">=0.3.0,<0.4"
# RLinf puts actions and observations on the device of the simulator.
_USE_CUDA = "import torch; torch.zeros(1, device='cuda').add_(1).item()"
# SAPIEN, ManiSkill's engine, needs Vulkan even where nothing is looked at.
_RENDER_WITH_SAPIEN = """
import sapien
scene = sapien.Scene()
camera = scene.add_camera("probe", 16, 16, 1.0, 0.01, 10.0)
scene.set_ambient_light([1.0, 1.0, 1.0])
scene.update_render()
camera.take_picture()
if camera.get_picture("Color").shape[:2] != (16, 16):
    raise RuntimeError("the camera gave no picture")
"""


def probe(script: str) -> str | None:
    """Run a script in a process of its own; None if it ended well, else the last line of its error."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"the probe ended with exit code {done.returncode}"


def maniskill_lacks(sim_backend: str) -> list[str]:
    """Why ManiSkill can't run here, one sentence a reason; none where it can.

    Args:
        sim_backend: of ManiSkill: ``gpu`` or ``cuda`` needs CUDA, ``cpu`` and ``physx_cpu`` do not.
    """
    lacks = _missing_packages({"mani_skill": "pip install mani-skill"})
    if "cpu" not in sim_backend:
        lacks += _failed({"CUDA": _USE_CUDA})
    if importlib.util.find_spec("sapien") is not None:
        lacks += _failed({"Vulkan rendering by SAPIEN": _RENDER_WITH_SAPIEN})
    return lacks


def isaaclab_lacks() -> list[str]:
    """Why Isaac Lab can't run here, one sentence a reason; none where it can."""
    packages = {
        "isaaclab": "install Isaac Lab by its own guide, in this environment",
        "isaacsim": "it comes with Isaac Lab",
    }
    return _missing_packages(packages) + _failed({"CUDA": _USE_CUDA})


def require(simulator: str, lacks: Callable[[], list[str]]) -> None:
    """Refuse a simulator that can't run here.

    Raises:
        ValueError: with every reason.
    """
    reasons = lacks()
    if reasons:
        raise ValueError(
            f"{simulator} can't run here: {'; '.join(reasons)}. It needs an NVIDIA GPU with its driver; "
            "`env=metaworld`, `env=libero` and `env=pusht` run on any machine."
        )


def _missing_packages(packages: dict[str, str]) -> list[str]:
    problem = version_problem("rlinf", RLINF_VERSIONS)
    missing = [f"{name} is not installed ({hint})" for name, hint in packages.items() if not _is_installed(name)]
    return ([problem] if problem else []) + missing


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _failed(probes: dict[str, str]) -> list[str]:
    reasons = {what: probe(script) for what, script in probes.items()}
    return [f"{what} does not work: {reason}" for what, reason in reasons.items() if reason is not None]
