# SPDX-License-Identifier: Apache-2.0
"""The choice of an OpenGL backend: one that renders, or an error with each one's reason."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from embodix.simulation import rendering


def test_a_backend_that_renders_is_found():
    assert None in (rendering.probe_gl_backend("egl"), rendering.probe_gl_backend("osmesa"))


def test_an_unknown_backend_gives_its_reason():
    assert "MUJOCO_GL" in rendering.probe_gl_backend("vulkan")


def test_the_second_backend_is_taken_when_the_first_fails(monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setenv("PYOPENGL_PLATFORM", "egl")
    monkeypatch.setattr(rendering, "probe_gl_backend", {"egl": "no driver", "osmesa": None}.get)
    assert rendering.select_gl_backend() == "osmesa"
    assert (os.environ["MUJOCO_GL"], os.environ["PYOPENGL_PLATFORM"]) == ("osmesa", "osmesa")


def test_without_any_backend_the_error_has_every_reason(monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(rendering, "probe_gl_backend", {"egl": "no driver", "osmesa": "no library"}.get)
    with pytest.raises(RuntimeError, match="egl: no driver; osmesa: no library"):
        rendering.select_gl_backend()


def test_a_mujoco_that_was_imported_before_renders_too():
    script = (
        "import mujoco, os; from embodix_metaworld.simulator import MetaWorldScene; "
        "scene = MetaWorldScene('reach-v3', ('front',), 32); scene.reset(0); "
        "print(scene.render()['front'].std() > 5, flush=True); os._exit(0)"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("MUJOCO_GL", "PYOPENGL_PLATFORM")}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "True", result.stderr


def test_the_users_choice_is_kept(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    monkeypatch.setattr(rendering, "probe_gl_backend", lambda backend: pytest.fail("probed"))
    assert rendering.select_gl_backend() == "osmesa"
