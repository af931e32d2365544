# SPDX-License-Identifier: Apache-2.0
"""Off-screen OpenGL for MuJoCo: which backend renders on this machine, found by rendering a frame."""

import importlib
import os
import subprocess
import sys

GL_BACKENDS = ("egl", "osmesa")
PROBE_TIMEOUT_S = 120.0

_RENDER_ONE_FRAME = """
import mujoco
model = mujoco.MjModel.from_xml_string(
    '<mujoco><worldbody><light pos="0 0 3"/><geom type="sphere" size=".5" rgba="1 0 0 1"/></worldbody></mujoco>'
)
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 16, 16)
renderer.update_scene(data)
image = renderer.render()
if image.max() == 0:
    raise RuntimeError("the frame is black")
"""


def probe_gl_backend(backend: str) -> str | None:
    """Render one frame with a backend in a process of its own.

    A process of its own, because PyOpenGL binds the first backend it meets and cannot change it, and a driver may
    crash.

    Returns:
        None when a frame was rendered, else the reason why not.
    """
    environment = {**os.environ, "MUJOCO_GL": backend}
    environment.pop("PYOPENGL_PLATFORM", None)
    command = [sys.executable, "-c", _RENDER_ONE_FRAME]
    try:
        probe = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=PROBE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"rendering one frame took more than {PROBE_TIMEOUT_S:g} s"
    if probe.returncode == 0:
        return None
    lines = [line for line in probe.stderr.splitlines() if line and not line.startswith(" ")]
    errors = [line for line in lines if "Error" in line.split(":")[0]] or lines
    return errors[0] if errors else f"the probe ended with exit code {probe.returncode}"


def select_gl_backend() -> str:
    """Choose the OpenGL backend of this process and its children; sets ``MUJOCO_GL`` and ``PYOPENGL_PLATFORM``.

    A ``MUJOCO_GL`` that is already set is the user's choice and is kept.

    Raises:
        RuntimeError: no backend renders; the message has the reason of each.
    """
    chosen = os.environ.get("MUJOCO_GL")
    if chosen:
        return chosen
    reasons = {}
    for backend in GL_BACKENDS:
        reason = probe_gl_backend(backend)
        if reason is None:
            # PyOpenGL's own variable must not say another one; the probe ran without it.
            os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = backend
            return backend
        reasons[backend] = reason
    raise RuntimeError(
        "MuJoCo needs an off-screen OpenGL backend, and none rendered a frame here: "
        + "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
        + ". On Debian and Ubuntu: apt-get install libegl1 libegl-mesa0 libosmesa6"
    )


def bind_gl_backend() -> None:
    """Select a backend and make MuJoCo use it, even if it was imported before and has chosen another.

    Raises:
        RuntimeError: no backend renders on this machine.
    """
    backend = select_gl_backend()
    gl_context = importlib.import_module("mujoco.rendering.classic.gl_context")
    if backend in GL_BACKENDS and gl_context.GLContext.__module__ != f"mujoco.{backend}":
        importlib.reload(gl_context)  # it reads MUJOCO_GL when it is loaded
