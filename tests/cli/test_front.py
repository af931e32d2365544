# SPDX-License-Identifier: Apache-2.0
"""The front as a process: what it imports, completes, dispatches and returns."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Process = Callable[..., subprocess.CompletedProcess[str]]

LISTS_TORCH = """
import atexit, sys
from embodix.cli.main import dispatch
atexit.register(lambda: print("TORCH" if "torch" in sys.modules else "NO_TORCH"))
sys.exit(dispatch("lerobot", sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("arguments", "shows"),
    [
        (["--help"], "upstream LeRobot (arguments as for lerobot-<verb>): calibrate, "),
        (["train", "--help"], "attention: auto, flash_attn_2"),
        (["train", "--cfg", "job", "+plugin=embodix"], "packing:\n  name: padding_free"),
        (["train", "--info", "defaults"], "schema/train"),
        (["compare", "--cfg", "job"], "variants:\n"),
    ],
)
def test_looking_at_the_config_imports_no_torch(run_process: Process, arguments: list[str], shows: str) -> None:
    done = run_process("-c", LISTS_TORCH, *arguments)
    assert done.returncode == 0, done.stderr
    assert shows in done.stdout
    assert done.stdout.rstrip().endswith("NO_TORCH")


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("lerobot train attention=", {"attention=upstream", "attention=auto", "attention=segment_gemm"}),
        ("lerobot train attention=seg", {"attention=segment_gemm", "attention=segment_sdpa", "attention=segment_auto"}),
        ("lerobot train +plugin=", {"+plugin=embodix", "+plugin=none"}),
        ("lerobot train train.st", {"train.steps="}),
        ("lerobot co", {"compare"}),
        ("lerobot tr", {"train", "train-tokenizer"}),
        ("lerobot edit", {"edit-dataset"}),
    ],
)
def test_tab_completion(run_process: Process, line: str, completions: set[str]) -> None:
    done = run_process("-m", "embodix", "-sc", "query=bash", COMP_LINE=line)
    assert done.returncode == 0, done.stderr
    offered = set(done.stdout.split())
    assert completions <= offered
    typed = line.split()[-1]
    assert all(word.startswith(typed) for word in offered)


def test_module_entry_is_the_same_program(run_process: Process) -> None:
    done = run_process("-m", "embodix", "train", "--cfg", "job", "-p", "packing", "+plugin=embodix")
    assert done.returncode == 0, done.stderr
    assert "name: padding_free" in done.stdout


@pytest.mark.parametrize("arguments", [[], ["frobnicate"]])
def test_no_or_unknown_verb_is_a_failure(run_process: Process, arguments: list[str]) -> None:
    done = run_process("-m", "embodix", *arguments)
    assert done.returncode == 2
    assert "doctor" in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["info"],
        ["edit-dataset", "--repo_id=a/b", "--operation.type=no_such_operation"],
    ],
    ids=["info", "failure"],
)
def test_upstream_verbs_print_and_return_what_upstreams_commands_do(run_process: Process, arguments: list[str]) -> None:
    upstream = Path(sys.executable).parent / f"lerobot-{arguments[0]}"
    ours = run_process("-m", "embodix", *arguments)
    own = subprocess.run([upstream, *arguments[1:]], capture_output=True, text=True, env=_environment(), check=False)
    assert ours.returncode == own.returncode
    assert (ours.returncode != 0) == ("no_such" in arguments[-1])
    assert _settled(ours.stdout) == _settled(own.stdout)
    assert ours.stdout + ours.stderr


def _settled(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
