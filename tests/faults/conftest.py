# SPDX-License-Identifier: Apache-2.0
"""Runs that are made to fail, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from embodix_pi05.testing import small_run

NUM_STEPS = 4
FAILING_RUN = Path(__file__).with_name("failing_run.py")


@pytest.fixture(scope="session")
def run_overrides(demonstrations: Path) -> Callable[[Path], list[str]]:
    """Overrides of a run with a checkpoint every two steps."""
    options = [f"train.steps={NUM_STEPS}", "train.save_freq=2", "+plugin=embodix"]
    return lambda folder: small_run(demonstrations, *options, f"train.output_dir={folder}")


@pytest.fixture(scope="session")
def failing_run() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Start ``failing_run.py`` with a fault and Hydra overrides."""

    def run(fault: str, overrides: list[str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(FAILING_RUN), fault, *overrides]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)

    return run
