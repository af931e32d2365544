# SPDX-License-Identifier: Apache-2.0
"""The schedules on the virtual clock agree with what can be computed by hand, and reach what they are meant to."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import cache

import pytest

from embodix_rl.scheduling.simulation import Simulated, simulate
from embodix_rl.scheduling.simulation.schedules import (
    PIPELINE,
    STOCK_ASYNC,
    STOCK_DECOUPLED,
    SYNC,
    SimulatedSchedule,
    combinations,
    released,
    rl_vla3,
)
from embodix_rl.scheduling.simulation.workload import Workload
from embodix_rl.scheduling.virtual_clock import run_virtually

CONSTANT = Workload()
STRAGGLERS = Workload(sigma=0.5)
FULL = rl_vla3(True, True, True)


@cache
def run(schedule: SimulatedSchedule, workload: Workload = CONSTANT) -> Simulated:
    return run_virtually(simulate(schedule, workload, 12 if schedule.max_staleness is None else 5))


def gain(schedule: SimulatedSchedule, over: SimulatedSchedule, workload: Workload = CONSTANT) -> float:
    """Fresh frames per second of one schedule over another's."""
    return run(schedule, workload).summary.fresh_frames_per_s / run(over, workload).summary.fresh_frames_per_s


def seconds_a_batch(schedule: SimulatedSchedule, workload: Workload = CONSTANT) -> float:
    return workload.frames_per_batch / run(schedule, workload).summary.fresh_frames_per_s


def test_all_switches_off_is_the_synchronous_schedule():
    off = next(iter(combinations()))
    assert dataclasses.replace(off, name=SYNC.name, assumes=SYNC.assumes) == SYNC


def test_synchronous_seconds_are_the_sum_of_the_parts():
    messages_s = 2 * CONSTANT.message_s * CONSTANT.steps_per_batch
    expected = CONSTANT.serial_s() + CONSTANT.weights_s + messages_s
    assert seconds_a_batch(SYNC) == pytest.approx(expected, rel=1e-3)


def test_two_stages_hide_the_shorter_part():
    """Of each step the longer of both parts remains, and once a rollout one stage's inference to fill the pipeline."""
    longer_s = max(CONSTANT.env_s, 2 * CONSTANT.inference_s(CONSTANT.num_env_workers * CONSTANT.num_envs // 2))
    assert seconds_a_batch(PIPELINE) == pytest.approx(
        longer_s * CONSTANT.steps_per_batch + CONSTANT.train_s + CONSTANT.weights_s, rel=0.02
    )


def test_training_asynchronously_alone_is_bound_by_the_serial_rollout():
    rollout_s = (CONSTANT.chunk_step_s + 2 * CONSTANT.message_s) * CONSTANT.steps_per_batch
    assert seconds_a_batch(rl_vla3(True, False, False)) == pytest.approx(rollout_s, rel=0.01)


def test_a_run_repeats_to_the_last_record():
    workload = dataclasses.replace(STRAGGLERS, num_steps=4)
    first, second = (run_virtually(simulate(FULL, workload, 4)) for _ in range(2))
    assert first.timeline == second.timeline
    other = run_virtually(simulate(FULL, dataclasses.replace(workload, seed=1), 4))
    assert other.timeline != first.timeline


@pytest.mark.parametrize(
    ("over", "least"),
    [(SYNC, 2.27), (PIPELINE, 1.6), (STOCK_ASYNC, 1.5), (STOCK_DECOUPLED, 1.15)],
    ids=lambda one: str(one)[:12],
)
def test_rl_vla3_gains_over_each_baseline(over, least):
    assert gain(FULL, over) >= least


def test_rl_vla3_reaches_the_bound_also_with_stragglers():
    assert 0.95 <= run(FULL).share_of_bound <= 1.01
    assert run(FULL, STRAGGLERS).share_of_bound >= 0.95
    assert gain(FULL, SYNC, STRAGGLERS) >= 2.5


@pytest.mark.parametrize("schedule", list(combinations()), ids=lambda schedule: schedule.name)
def test_rl_vla3_uses_each_sample_once_and_none_is_too_old(schedule):
    summary = run(schedule).summary
    assert (summary.reuse_factor, summary.discarded_share) == (1.0, 0.0)
    assert max(summary.staleness) <= schedule.max_staleness
    assert summary.frames_per_s == summary.fresh_frames_per_s


def test_each_switch_helps_where_the_paper_says_and_none_hurts():
    """The authors' rows: rollout asynchrony gains more than training asynchrony, both together most of it."""
    train, rollout, both, all_three = (
        seconds_a_batch(released(*switches, CONSTANT.trajectories_per_batch))
        for switches in [(True, False, False), (False, True, False), (True, True, False), (True, True, True)]
    )
    assert seconds_a_batch(SYNC) > train > rollout > both > all_three > seconds_a_batch(FULL)
    assert both / all_three < 1.25 < train / both


def test_streaming_makes_samples_fresher():
    """Trained while they arrive, they meet fewer new versions."""
    late, early = (run(rl_vla3(True, True, streaming)).summary.staleness for streaming in (False, True))
    assert early.get(0, 0) > late.get(0, 0)


def test_the_stock_runner_trains_samples_again_and_discards_others():
    summary = run(STOCK_ASYNC, STRAGGLERS).summary
    assert summary.reuse_factor > 1.2 and summary.frames_per_s > summary.fresh_frames_per_s
    assert summary.discarded_share > 0
    assert max(summary.staleness) <= STOCK_ASYNC.reuse_versions


def test_the_summary_says_who_waits_for_whom():
    summary = run(SYNC).summary
    # Three batches are counted; while the last is trained, generation has ended.
    assert summary.waited_s["env 0"]["trainer"] == pytest.approx(
        2 * CONSTANT.train_s + 3 * CONSTANT.weights_s, rel=0.01
    )
    assert summary.waited_s["trainer"]["env workers"] > summary.waited_s["env 0"]["rollout 0"] > 0
    assert summary.parts_s["env"] == pytest.approx(CONSTANT.env_s * CONSTANT.steps_per_batch, rel=0.01)
    assert summary.parts_s["trainer"] == pytest.approx(CONSTANT.train_s, rel=1e-6)


def test_the_same_objects_run_on_the_ordinary_event_loop():
    """No figure of it is asserted: the machine may be busy."""
    workload = Workload(num_steps=2, chunk_step_s=0.02, weights_s=0.002, message_s=0.0005, sigma=0.5)
    summary = asyncio.run(simulate(FULL, workload, 4)).summary
    assert (summary.reuse_factor, summary.discarded_share) == (1.0, 0.0)
    assert max(summary.staleness) <= 1 and sum(summary.staleness.values()) == 2 * 4 * 4 * 4
    assert 0 < summary.bound_share <= 1


def test_declared_values_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"`fixed_share` is a share, got 1\.5"):
        Workload(fixed_share=1.5)
    with pytest.raises(ValueError, match="A worker's 48 environments make no 5 equal shards"):
        run_virtually(simulate(rl_vla3(True, True, True, num_shards=5), CONSTANT))
