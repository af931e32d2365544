# SPDX-License-Identifier: Apache-2.0
"""Faults of a run of ``runner=rl_vla3`` with real processes; `make rl` installs what they need."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from embodix.report.manifest import load_manifest
from embodix_rl.report.rl_steps import RlStep, read_rl_steps
from embodix_rl.rlinf.hosts import missing
from embodix_rl.testing.rl_runs import await_rl, finish_rl, frames_of_a_step, left_behind, start_rl

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason="; ".join(missing()) or "RLinf and Ray are installed"),
]


def _start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    sizes = ("runner=rl_vla3", "placement.env_workers=2", "rollout.stages=2")
    return start_rl(folder, *sizes, "cluster.start_timeout_s=300", *overrides)


def _finish(run: subprocess.Popen[str], expected: int = 0) -> str:
    return finish_rl(run, expected, timeout_s=600)


def _await(run: subprocess.Popen[str], is_so: Callable[[], bool]) -> None:
    await_rl(run, is_so, timeout_s=500)


def _num_steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _strike(run: subprocess.Popen[str], folder: Path, group: str, sent: signal.Signals = signal.SIGKILL) -> str:
    """End or stop the process of a worker group without asking; what the run says, which ends in time."""
    workers = load_manifest(folder / "manifest.json").settings["workers"]
    (pid,) = [worker["pid"] for worker in workers if worker["group"] == group]
    os.kill(pid, sent)
    struck_at = time.monotonic()
    said = _finish(run, expected=1)
    assert time.monotonic() - struck_at < 180
    return said


def _total(steps: list[RlStep], name: str) -> float:
    return sum(step.metrics[name] for step in steps)


def test_flaky_and_slow_environments_cost_their_trajectories_and_not_the_run(tmp_path):
    """Simulators that kill themselves again and again, and now and then take twenty times as long: every step is full,
    what was lost has no weight. Ray's object store has its least size; weights and trajectories don't go through it."""
    slow = "env.step_s={mean_s: 0.05, straggler_probability: 0.05, straggler_factor: 20}"
    options = ["runner.options.restarts_per_hour=50", "cluster.object_store_gb=0.08", "policy.width=2048"]
    said = _finish(_start(tmp_path, "rl.steps=5", "env.crash_every_steps=23", slow, *options))
    steps, whole = read_rl_steps(tmp_path / "metrics.jsonl"), frames_of_a_step(tmp_path)
    assert len(steps) == 5 and all(step.metrics["faults/masked_frames"] + step.frames == whole for step in steps)
    assert all(step.frames == step.fresh_frames for step in steps)
    assert _total(steps, "faults/restarts") >= 2 and _total(steps, "faults/masked_frames") > 0
    assert "crashed at chunk_step of its environment" in said and "restarts in the last hour" in said
    assert left_behind(tmp_path) == []


def test_a_hang_is_a_fault_and_spent_restarts_end_the_run_with_a_checkpoint(tmp_path):
    options = ["runner.options.restarts_per_hour=1", "runner.options.simulator_deadline_s=10"]
    said = _finish(_start(tmp_path, "rl.steps=1000", "env.hang_every_steps=20", *options), expected=1)
    assert "hung: no answer to chunk_step of its environment" in said
    assert "may not start them again: 1 of 1 restarts in the last hour" in said
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert f"Checkpoint: {saved}" in said and any((saved / "actor").iterdir())
    assert left_behind(tmp_path) == []


def test_killed_processes_end_a_run_and_it_goes_on_with_the_trajectories_that_waited(tmp_path):
    """First inference is killed, then, in the run that goes on, the trainer: while it sends weights, most of the time,
    since they leave in hundreds of small parts. Training is slow, so that trajectories wait at every checkpoint."""
    options = [
        *("rl.steps=1000", "rl.save_every=1", "runner.options.max_staleness=3", "policy.training_s={1: 0.05}"),
        *("env.step_s=0.01", "runner.options.part_bytes=1", "policy.width=128"),
    ]
    first, second = tmp_path / "first", tmp_path / "second"
    run = _start(first, *options)
    checkpoint = first / "checkpoints" / "global_step_1"
    _await(run, checkpoint.exists)
    said = _strike(run, first, "RolloutGroup")
    assert "A process of rollout workers failed (rank 0: ActorDiedError" in said
    last = max((first / "checkpoints").iterdir(), key=lambda folder: int(folder.name.rpartition("_")[2]))
    assert f"Checkpoint: {last}" in said or f"Its last checkpoint is {last}" in said
    assert any((last / "actor").iterdir())

    waited = json.loads((checkpoint / "queue" / "gate.json").read_text())["state"]["finished"]
    assert waited and {one["ticket"]["version"] for one in waited} == {0}
    run = _start(second, f"resume={checkpoint}", *options)
    _await(run, lambda: _num_steps(second) >= 3)
    said = _strike(run, second, "ActorGroup")
    assert "A process of trainer failed (rank 0: ActorDiedError" in said
    assert "No checkpoint: the training process does not answer." in said
    steps, whole = read_rl_steps(second / "metrics.jsonl"), frames_of_a_step(second)
    assert [step.step for step in steps[:3]] == [1, 2, 3]
    assert all(step.frames == step.fresh_frames == whole for step in steps)
    assert 1 in steps[0].staleness  # of version 0, in the step of version 1
    for number, step in enumerate(steps, start=1):
        assert step.metrics["gate/restored"] == len(waited)
        assert step.metrics["gate/taken"] == 4 * number <= step.metrics["gate/finished"] + len(waited)
    assert left_behind(first) == left_behind(second) == []


def test_a_process_that_stops_ends_the_run_at_the_deadline(tmp_path):
    deadlines = ["runner.options.deadline_s=60", "runner.options.simulator_deadline_s=10"]
    run = _start(tmp_path, "rl.steps=1000", *deadlines)
    _await(run, lambda: _num_steps(tmp_path) >= 2)
    said = _strike(run, tmp_path, "RolloutGroup", signal.SIGSTOP)
    assert "waits for rollout workers: actions" in said and "of at most 60 s" in said
    assert left_behind(tmp_path) == []
