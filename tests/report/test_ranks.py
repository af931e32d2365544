# SPDX-License-Identifier: Apache-2.0
"""Variants of several ranks: what each rank holds and exchanges, and whether the strategies train the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_folders import write_run

from embodix.report.compare import CompareReport, SpeedBound, compare_runs
from embodix.report.comparison_page import render_comparison, verdict_line, verdicts
from embodix.report.comparison_table import comparison_rows
from embodix.report.ranks import RanksSummary
from embodix.report.runs import read_run

MIB = 2**20
WHOLE = {"sharded": 0, "replicated": 8 * MIB, "optimizer": 16 * MIB, "total": 8 * MIB}
HALF = {"sharded": 4 * MIB, "replicated": MIB, "optimizer": 9 * MIB, "total": 8 * MIB}
SUMMED = {"all-reduce": {"num_calls": 3, "num_bytes": 8 * MIB}}
GATHERED = {
    "reduce-scatter": {"num_calls": 5, "num_bytes": 7 * MIB},
    "all-gather": {"num_calls": 10, "num_bytes": 14 * MIB},
}


def settings(strategy: str, placed: dict[str, int], traffic: dict[str, Any], **layout: int) -> dict[str, Any]:
    smaller = {**placed, "sharded": max(0, placed["sharded"] - MIB)}
    ranks = [
        {"rank": rank, "world": 2, "strategy": strategy, "backend": "gloo", "placed": held}
        for rank, held in enumerate((smaller, placed))
    ]
    dimensions = {"data": 1, "shard": 1, "pipeline": 1, "tensor": 1} | layout
    return {"parallel": {"name": "x", "layout": dimensions, "ranks": ranks, "communication": traffic}}


def report_of(folder: Path, second: dict[str, Any], **changes: Any) -> CompareReport:
    runs = [
        write_run(folder / "ddp", "ddp", num_steps=20, settings=settings("DDP", WHOLE, SUMMED, data=2)),
        write_run(folder / "other", "other", num_steps=20, settings=second, **changes),
    ]
    bounds = {"other": SpeedBound(this_size=1)}
    return compare_runs([read_run(run) for run in runs], baseline="ddp", bounds=bounds)


SHARDED = settings("FSDP2", HALF, GATHERED, shard=2)


def test_the_table_and_the_page_say_what_a_rank_holds_and_exchanges(tmp_path: Path) -> None:
    report = report_of(tmp_path, SHARDED, loss_shift=1e-8)
    rows = {label: cells for label, cells in comparison_rows(report) if label}
    assert rows["strategy"] == ["DDP over gloo", "FSDP2 over gloo"]
    assert rows["ranks"] == ["2: 2 copies", "2: 2 shards"]
    assert rows["parameters cut, a rank"] == ["0 KiB", "4 MiB"]
    assert rows["parameters whole, a rank"] == ["8 MiB", "1 MiB"]
    assert rows["optimizer state, a rank"] == ["16 MiB", "9 MiB"]
    assert rows["exchanged a step"] == ["8 MiB", "21 MiB"]
    page = render_comparison(report)
    assert "all-gather 10 calls, reduce-scatter 5 calls" in page
    assert "Counted in the first step of the first rank" in page
    assert "held by a rank: 14 MiB" in verdict_line(report, report.pairs[0])


def test_equal_computations_have_no_bound_by_operations(tmp_path: Path) -> None:
    report = report_of(tmp_path, SHARDED)
    assert report.pairs[0].bound is None
    assert not any(card.label.startswith("Bound") for card in verdicts(report, report.pairs[0]))


def test_a_part_of_a_samples_operations_is_no_ratio(tmp_path: Path) -> None:
    report = report_of(tmp_path, settings("tensor", HALF, SUMMED, tensor=2), flops_per_step=1e9)
    assert report.pairs[0].flop_ratio is None


@pytest.mark.parametrize(("shift", "same"), [(2e-6, True), (3e-6, False)])
def test_a_strategy_that_departs_after_the_first_step_is_another_function(
    tmp_path: Path, shift: float, same: bool
) -> None:
    """The fifth step has four times the shift, of which 1e-5 is allowed; the first has none."""
    report = report_of(tmp_path, SHARDED, loss_shift=shift)
    assert report.pairs[0].first_loss_difference <= 1e-15
    assert report.pairs[0].same_function is same
    card = verdicts(report, report.pairs[0])[0]
    assert (card.figure == "yes") is same
    assert "in the first 5" in card.sentence


def test_one_process_has_no_ranks_to_speak_of() -> None:
    one = settings("one process", WHOLE, {})["parallel"]
    assert RanksSummary.from_settings({"parallel": {**one, "ranks": one["ranks"][:1]}}) is None
    assert RanksSummary.from_settings({}) is None


def test_the_times_are_said_to_be_the_first_ranks(tmp_path: Path) -> None:
    assert "in 2 processes of which the times are the first" in render_comparison(report_of(tmp_path, SHARDED))
