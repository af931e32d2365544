# SPDX-License-Identifier: Apache-2.0
"""Busy shares, waits, fresh frames per second and the bound follow from the records."""

from __future__ import annotations

import asyncio

import pytest

from embodix_rl.report.spans import Span
from embodix_rl.scheduling.timeline import Timeline, TrainedBatch, summarize
from embodix_rl.scheduling.virtual_clock import run_virtually


def recorded() -> Timeline:
    """Three batches of 100 frames at t = 10, 20, 30; the last repeats half of the second's."""
    batches = [TrainedBatch(10.0 * (index + 1), index, 100, 100, {0: 4}) for index in range(2)]
    batches.append(TrainedBatch(30.0, 2, 100, 50, {1: 3, 2: 1}))
    spans = [
        Span("env 0", "step", 0.0, 18.0),
        Span("env 0", "actions", 18.0, 22.0, whom="rollout 0"),
        Span("env 0", "step", 22.0, 30.0),
        Span("env 1", "step", 12.0, 16.0),
        Span("rollout 0", "infer", 5.0, 15.0),
        Span("trainer", "train", 26.0, 34.0),
        Span("trainer", "samples", 10.0, 26.0, whom="env 0"),
    ]
    return Timeline(spans, batches, discarded_frames=50)


def test_the_summary_counts_what_is_after_warm_up():
    summary = summarize(recorded(), warm_up_batches=1)
    assert summary.seconds == 20.0
    assert (summary.fresh_frames_per_s, summary.frames_per_s) == (7.5, 10.0)
    assert summary.reuse_factor == pytest.approx(200 / 150)
    assert summary.discarded_share == pytest.approx(50 / 300)
    assert summary.staleness == {0: 4, 1: 3, 2: 1}
    assert summary.busy_share == {"env 0": 0.8, "env 1": 0.2, "rollout 0": 0.25, "trainer": 0.2}
    assert summary.waited_s == {"env 0": {"rollout 0": 4.0}, "trainer": {"env 0": 16.0}}
    assert summary.parts_s == pytest.approx({"env": 16 / 1.5, "rollout": 5 / 1.5, "trainer": 4 / 1.5})
    assert summary.bound_s == pytest.approx(16 / 1.5) and summary.bound_share == pytest.approx(0.8)


def test_a_summary_needs_batches_after_warm_up():
    for warm_up in (0, 3):
        with pytest.raises(ValueError, match=f"got {warm_up} of 3"):
            summarize(recorded(), warm_up)


def test_records_are_taken_on_the_loops_clock():
    async def work() -> Timeline:
        timeline = Timeline()
        with timeline.busy("env 0", "step"):
            await asyncio.sleep(2)
        with timeline.wait("env 0", "rollout 0", "actions"):
            await asyncio.sleep(3)
        with timeline.wait("env 0", "rollout 0", "nothing"):
            pass
        timeline.trained(4, 10, 8, {1: 2})
        return timeline

    timeline = run_virtually(work())
    assert timeline.spans == [
        Span("env 0", "step", 0.0, 2.0),
        Span("env 0", "actions", 2.0, 5.0, "rollout 0"),
    ]
    assert timeline.batches == [TrainedBatch(5.0, 4, 10, 8, {1: 2})]
