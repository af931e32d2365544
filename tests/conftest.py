# SPDX-License-Identifier: Apache-2.0
"""Environments of their own for tests that install things, layered on this one so that nothing heavy is repeated."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class LayeredEnvironment:
    """A virtual environment that finds what it does not hold itself in the environment of the tests.

    The layer is a plain path, whose own ``.pth`` files are not followed: the embodix that is installed for
    development cannot be imported through it, only what is installed here.
    """

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def install(self, *arguments: str | Path) -> None:
        """``pip install`` without dependencies, index or build isolation."""
        options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", *options]
        subprocess.run([*pip, *map(str, arguments)], check=True, env=_clean_environment())

    def run(self, *command: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command of this environment (``python``, ``lerobot``, ``embodix``) outside the repository."""
        program = self.folder / "bin" / command[0]
        arguments = [str(program), *map(str, command[1:])]
        return subprocess.run(
            arguments, cwd=self.folder, capture_output=True, text=True, timeout=timeout, env=_clean_environment()
        )

    def run_python(self, script: str, *arguments: str) -> str:
        """Run a script that must succeed and return what it printed."""
        result = self.run("python", "-c", script, *arguments)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout


def _clean_environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return environment | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What checks keep of a data set goes into a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMBODIX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def new_environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LayeredEnvironment]:
    """Makes an empty layered environment of a given name."""

    def make(name: str) -> LayeredEnvironment:
        environment = LayeredEnvironment(tmp_path_factory.mktemp(name) / "venv")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment.folder)], check=True)
        paths = {"base": str(environment.folder), "platbase": str(environment.folder)}
        site_packages = Path(sysconfig.get_path("purelib", "venv", vars=paths))
        (site_packages / "layer.pth").write_text(sysconfig.get_path("purelib") + "\n")
        return environment

    return make


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "-w", str(folder), str(REPOSITORY)], check=True)
    (built,) = folder.glob("embodix-*.whl")
    return built


@pytest.fixture(scope="session")
def wheel_environment(new_environment: Callable[[str], LayeredEnvironment], wheel: Path) -> LayeredEnvironment:
    """An environment with embodix installed from its wheel."""
    environment = new_environment("from_wheel")
    environment.install(wheel)
    return environment


@pytest.fixture(scope="session")
def editable_environment(new_environment: Callable[[str], LayeredEnvironment]) -> LayeredEnvironment:
    """An environment with embodix installed editable from this checkout."""
    environment = new_environment("editable")
    environment.install("--editable", REPOSITORY)
    return environment


@pytest.fixture(scope="session")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Root of a small recording made by the real recorder: two tasks of two episodes, two cameras of 28 pixels."""
    from embodix_metaworld.demonstrations import RecordSettings
    from embodix_metaworld.recorder import record_metaworld

    settings = RecordSettings(
        root=str(tmp_path_factory.mktemp("demonstrations") / "dataset"),
        tasks=("reach-v3", "button-press-topdown-v3"),
        episodes_per_task=2,
        image_size=28,
        drift_fraction=0.0,
        num_workers=1,
        progress=False,
    )
    return record_metaworld(settings).root


@pytest.fixture(scope="session")
def small_settings() -> Callable[..., Any]:
    """Two tasks, one episode each, small images, recorded in this process; changed as a test asks."""
    from embodix_metaworld.demonstrations import RecordSettings

    def make(root: Path, **changes: Any) -> Any:
        settings = {
            "tasks": ("reach-v3", "button-press-topdown-v3"),
            "episodes_per_task": 1,
            "image_size": 32,
            "num_workers": 1,
            "drift_fraction": 0.0,
            "progress": False,
        }
        return RecordSettings(root=str(root), **{**settings, **changes})

    return make


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory, small_settings: Callable[..., Any]) -> Any:
    """A small recording, made once."""
    from embodix_metaworld.recorder import record_metaworld

    return record_metaworld(small_settings(tmp_path_factory.mktemp("recorded") / "dataset"))


@pytest.fixture(scope="session")
def arm_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An arm of seven joints with two cameras: two episodes of twelve frames at 10 Hz."""
    from embodix.testing.datasets import write_dataset

    return write_dataset(tmp_path_factory.mktemp("arm") / "arm", state_dim=7, action_dim=7)


@pytest.fixture(scope="session")
def hands_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms with three cameras: one episode of twelve frames at 30 Hz."""
    from embodix.testing.datasets import write_dataset

    cameras, tasks = ("top", "left", "right"), ("fold the towel with both hands",)
    root = tmp_path_factory.mktemp("hands") / "hands"
    return write_dataset(root, cameras=cameras, state_dim=14, action_dim=14, tasks=tasks, fps=30, seed=1)
