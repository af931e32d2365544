# SPDX-License-Identifier: Apache-2.0
"""Runs of `lerobot rl` on declared times, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from embodix.report.manifest import load_manifest

RUN_VARIABLE = "EMBODIX_TESTED_RUN"  # in the environment of every process of a run


def start_rl(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """Begin a run of short declared times in `folder`; a later override wins."""
    command = [
        *(sys.executable, "-m", "embodix", "rl", "cluster.num_cpus=2", "env.step_s=0.05"),
        *("policy.inference_s={1: 0.01}", "policy.training_s={1: 0.001}", f"hydra.run.dir={folder}", *overrides),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", RUN_VARIABLE: str(folder)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )


def finish_rl(run: subprocess.Popen[str], expected: int = 0, timeout_s: float = 1800.0) -> str:
    """Wait for a run; what it said.

    Raises:
        AssertionError: it ended with another code than `expected`.
    """
    said, _ = run.communicate(timeout=timeout_s)
    assert run.returncode == expected, said[-6000:]
    return said


def await_rl(run: subprocess.Popen[str], is_so: Callable[[], bool], timeout_s: float) -> None:
    """Until something is so while the run goes on.

    Raises:
        AssertionError: the run ended, or it took too long.
    """
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert run.poll() is None, run.communicate()[0][-6000:]
        assert time.monotonic() < deadline
        time.sleep(0.2)


def frames_of_a_step(folder: Path) -> int:
    """Action steps that a training step of a run trains on, over all environments."""
    sizes = load_manifest(folder / "manifest.json").settings["sizes"]
    return int(sizes["num_envs"] * sizes["rollout_epochs"] * sizes["steps_per_epoch"])


def left_behind(folder: Path) -> list[str]:
    """Processes that the run in `folder` began and that still exist a moment after its end."""
    time.sleep(1.0)
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(RUN_VARIABLE) == str(folder):
                found.append(" ".join(process.cmdline()))
    return found
