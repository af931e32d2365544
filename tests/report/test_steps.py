# SPDX-License-Identifier: Apache-2.0
"""Step records survive writing, killing and resuming."""

from __future__ import annotations

import dataclasses
import math

import pytest

from embodix.report.steps import PHASES, StepRecord, TokenRecord, append_step, read_steps


def record(step: int, **changes) -> StepRecord:
    base = StepRecord(
        step=step,
        loss=1.0 / step,
        grad_norm=0.5,
        lr=1e-4,
        num_samples=4,
        wall_s=dict.fromkeys(PHASES, 0.1),
        cpu_s=dict.fromkeys(PHASES, 0.2),
        tokens=TokenRecord(valid=2468, computed=2468, upstream=4072, images_computed=8, images_upstream=12),
        action_valid=600,
        action_total=800,
    )
    return dataclasses.replace(base, **changes)


def test_records_round_trip(tmp_path):
    written = [record(1), record(2, tokens=None, action_valid=None, action_total=None)]
    for item in written:
        append_step(tmp_path / "run" / "steps.jsonl", item)
    assert read_steps(tmp_path / "run" / "steps.jsonl") == written


def test_a_diverged_loss_is_kept(tmp_path):
    append_step(tmp_path / "steps.jsonl", record(1, loss=math.nan, grad_norm=math.inf))
    (read,) = read_steps(tmp_path / "steps.jsonl")
    assert math.isnan(read.loss)
    assert read.grad_norm == math.inf


@pytest.mark.parametrize("kept_bytes", [1, 40, 200])
def test_the_partial_last_line_of_a_killed_run_is_dropped(tmp_path, kept_bytes):
    path = tmp_path / "steps.jsonl"
    append_step(path, record(1))
    whole = path.read_bytes()
    append_step(path, record(2))
    path.write_bytes(path.read_bytes()[: len(whole) + kept_bytes])
    assert read_steps(path) == [record(1)]
    append_step(path, record(2, loss=7.0))
    assert read_steps(path) == [record(1), record(2, loss=7.0)]


def test_a_whole_last_line_without_newline_is_kept(tmp_path):
    path = tmp_path / "steps.jsonl"
    append_step(path, record(1))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert read_steps(path) == [record(1)]
    append_step(path, record(2))
    assert read_steps(path) == [record(1), record(2)]


def test_a_step_trained_again_after_a_resume_replaces_the_first(tmp_path):
    path = tmp_path / "steps.jsonl"
    for item in (record(1), record(2), record(3), record(2, loss=9.0)):
        append_step(path, item)
    assert [(item.step, item.loss) for item in read_steps(path)] == [(1, 1.0), (2, 9.0), (3, 1.0 / 3)]


def test_a_broken_line_in_the_middle_names_file_and_line(tmp_path):
    path = tmp_path / "steps.jsonl"
    append_step(path, record(1))
    path.write_bytes(path.read_bytes() + b'{"step": 2}\n')
    append_step(path, record(3))
    with pytest.raises(ValueError, match=r"steps\.jsonl, line 2 is not a step record"):
        read_steps(path)


def test_a_missing_file_says_what_writes_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="lerobot train"):
        read_steps(tmp_path / "steps.jsonl")


def test_an_unknown_phase_is_refused():
    with pytest.raises(ValueError, match="data_wait, preprocess, forward, backward, optimizer; got also sleeping"):
        record(1, wall_s={"sleeping": 1.0})
