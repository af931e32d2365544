# SPDX-License-Identifier: Apache-2.0
"""Commands run in this process, and in one of their own where the process is the point."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from embodix.cli.main import dispatch

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def run_verb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """``run_verb("train", "policy=...")`` gives the exit code and what was printed on stderr."""
    monkeypatch.setattr(sys, "argv", ["lerobot"])

    def run(*argv: str) -> tuple[int, str]:
        capsys.readouterr()
        code = dispatch("lerobot", list(argv))
        return code, capsys.readouterr().err

    return run


@pytest.fixture(scope="session")
def run_process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run this interpreter with arguments and extra environment variables."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | environment
        return subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=200, env=variables, check=False
        )

    return run
