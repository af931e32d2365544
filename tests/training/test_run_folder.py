# SPDX-License-Identifier: Apache-2.0
"""A second run is kept out of a folder for as long as the first lives, however that ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from embodix.launched_rank import is_first_rank
from embodix.testing.host_runs import train_here
from embodix.training.run_folder import owned_folder

HOLDER = """
import sys, time
from multiprocessing import get_context
from pathlib import Path
from embodix.training.run_folder import owned_folder
with owned_folder(Path(sys.argv[1])):
    if len(sys.argv) > 2:  # as a loader's worker does, a child outlives its parent for a moment
        get_context("fork").Process(target=time.sleep, args=(float(sys.argv[2]),)).start()
    print("owned", flush=True)
    time.sleep(60)
"""
Hold = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def hold() -> Hold:
    """A process that owns a folder."""
    held: list[subprocess.Popen[str]] = []

    def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(folder), *arguments]
        held.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert held[-1].stdout is not None and held[-1].stdout.readline() == "owned\n"
        return held[-1]

    yield start
    for process in held:
        process.kill()
        process.wait()


@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_second_owner_is_told_of_the_first(hold: Hold, tmp_path: Path, through_a_link: bool) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "link").symlink_to("run")
    process = hold(folder)
    message = rf"Another run writes into .* \(process {process.pid} on .*, started .*: -c .*/run\)"
    with pytest.raises(ValueError, match=message), owned_folder(tmp_path / "link" if through_a_link else folder):
        pytest.fail("two own one folder")


def test_a_killed_owner_frees_the_folder(hold: Hold, tmp_path: Path) -> None:
    """Also where a child of it still holds the lock for two seconds."""
    process = hold(tmp_path / "run", "2")
    process.send_signal(signal.SIGKILL)
    process.wait()
    began = time.monotonic()
    with owned_folder(tmp_path / "run"):
        assert json.loads((tmp_path / ".run.lock").read_text())["pid"] == os.getpid()
    assert time.monotonic() - began > 0.5, "the child held the lock"
    assert not (tmp_path / ".run.lock").exists()


def test_the_folder_is_free_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(KeyError), owned_folder(tmp_path / "run"):
        raise KeyError
    with owned_folder(tmp_path / "run"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variable", ["RANK", "OMPI_COMM_WORLD_RANK"])
def test_other_ranks_pass_through(hold: Hold, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    hold(tmp_path / "run")
    monkeypatch.setenv(variable, "1")
    assert not is_first_rank()
    with owned_folder(tmp_path / "run"):
        pass


def test_a_run_and_its_resumption_own_their_folder(
    blobs: Path, run_of: Callable[..., list[str]], hold: Hold, tmp_path: Path
) -> None:
    train_here(run_of(blobs, "train.steps=1"))
    before = sorted((tmp_path / "run").rglob("*"))
    process = hold(tmp_path / "run")
    for overrides in (run_of(blobs, "train.steps=1"), [f"resume={tmp_path}/run", "train.steps=2"]):
        with pytest.raises(ValueError, match=rf"Another run writes into .*process {process.pid} "):
            train_here(overrides)
    assert sorted((tmp_path / "run").rglob("*")) == before
