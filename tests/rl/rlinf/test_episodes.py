# SPDX-License-Identifier: Apache-2.0
"""Seeds of episodes, what is counted, and the records of training steps."""

from __future__ import annotations

import json

import numpy as np
import pytest

from embodix_rl.report.rl_steps import RlStep, append_rl_step, rates, read_rl_steps
from embodix_rl.report.spans import TimelineWriter, read_timeline
from embodix_rl.rlinf.rollout_episodes import EpisodeSeeds
from embodix_rl.rlinf.training_records import Consumption, StepRecorder, merge


def test_no_two_episodes_share_a_seed_except_in_a_group():
    ranks = [EpisodeSeeds(100, num_envs=4, group_size=2, place=place, num_places=3) for place in range(3)]
    drawn = [[rank.next(env) for env in range(4)] for _ in range(5) for rank in ranks]
    groups = [(row[0], row[2]) for row in drawn]
    assert all(row[0] == row[1] and row[2] == row[3] for row in drawn)
    seeds = [seed for group in groups for seed in group]
    assert sorted(seeds) == list(range(100, 100 + 30))


def test_restarted_seeds_begin_again():
    seeds = EpisodeSeeds(0, num_envs=2, group_size=1, place=0, num_places=1)
    first = [seeds.next(env) for env in (0, 1, 1)]
    seeds.restart()
    assert [seeds.next(env) for env in (0, 1, 1)] == first
    with pytest.raises(ValueError, match="no whole groups of 2"):
        EpisodeSeeds(0, num_envs=3, group_size=2, place=0, num_places=1)


def test_consumption_counts_frames_by_age_and_by_first_use():
    consumption = Consumption()
    consumption.add(np.array([3.0, 3.0, 2.0]), version=3, chunk=5, fresh=True)
    consumption.add(np.array([2.0]), version=4, chunk=5, fresh=False)
    counts = consumption.pop()
    assert counts == {"frames": 20, "fresh_frames": 15, "received": 0, "staleness": {0: 10, 1: 5, 2: 5}}
    assert consumption.pop() == {"frames": 0, "fresh_frames": 0, "received": 0, "staleness": {}}
    assert merge([counts, counts])["staleness"] == {0: 20, 1: 10, 2: 10}


def _step(number: int, begin_s: float, end_s: float, fresh: int, frames: int, staleness: dict[int, int]) -> RlStep:
    return RlStep(number, begin_s, end_s, frames, fresh, 0, staleness, declared_latency=True)


def test_rates_leave_warm_up_out_and_count_fresh_frames(tmp_path):
    steps = [
        _step(0, 0.0, 100.0, 999, 999, {0: 999}),
        _step(1, 100.0, 110.0, 100, 100, {0: 100}),
        _step(2, 110.0, 120.0, 0, 100, {1: 100}),
    ]
    for step in steps:
        append_rl_step(tmp_path / "metrics.jsonl", step)
    assert read_rl_steps(tmp_path / "metrics.jsonl") == steps
    counted = rates(steps, warmup_steps=1)
    assert (counted.fresh_frames_per_s, counted.trained_frames_per_s, counted.reuse) == (5.0, 10.0, 2.0)
    assert counted.staleness == {0: 0.5, 1: 0.5}
    with pytest.raises(ValueError, match="none after 3 of warm-up"):
        rates(steps, warmup_steps=3)
    with pytest.raises(FileNotFoundError, match="lerobot rl"):
        read_rl_steps(tmp_path / "absent.jsonl")


def test_recorder_makes_one_record_of_the_calls_of_a_step(tmp_path):
    counts = [{"frames": n, "fresh_frames": n, "received": 1, "staleness": {0: n}} for n in (10, 20)]
    recorder = StepRecorder(tmp_path / "metrics.jsonl", lambda: counts.pop(0), declared=False)
    for step in (0, 1):
        recorder.log({"env/return": 1.5 + step}, step)
        recorder.log({"train/loss": 0.5}, step)
    recorder.finish()
    recorder.finish()
    first, second = read_rl_steps(tmp_path / "metrics.jsonl")
    assert (first.step, first.frames, first.metrics) == (0, 10, {"env/return": 1.5, "train/loss": 0.5})
    assert (second.frames, second.begin_s) == (20, first.end_s)


def test_timeline_keeps_what_a_process_did(tmp_path):
    for worker in ("EnvGroup:0", "ActorGroup:0"):
        writer = TimelineWriter(tmp_path, worker)
        with writer.span("step"):
            pass
        with pytest.raises(KeyError), writer.span("train"):
            raise KeyError("lost")
    (tmp_path / "ActorGroup_0.jsonl").open("a").write('{"worker": "Act')  # a process that was killed while writing
    spans = read_timeline(tmp_path)
    assert [(span.worker, span.activity) for span in spans] == [
        ("EnvGroup:0", "step"),
        ("EnvGroup:0", "train"),
        ("ActorGroup:0", "step"),
        ("ActorGroup:0", "train"),
    ]
    assert all(span.seconds >= 0 for span in spans)
    assert json.loads((tmp_path / "EnvGroup_0.jsonl").read_text().splitlines()[0])["worker"] == "EnvGroup:0"
    with pytest.raises(FileNotFoundError, match="No timeline"):
        read_timeline(tmp_path / "absent")
