# SPDX-License-Identifier: Apache-2.0
"""A variant that composes its own batches is compared by the sample, and the report says so everywhere."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from run_folders import write_run

from embodix.report.compare import CompareReport, compare_runs
from embodix.report.comparison_page import render_comparison, verdicts
from embodix.report.comparison_table import comparison_rows
from embodix.report.runs import read_run, with_counts_of

COMPOSITION = {"composition": {"schedule": "by samples"}}


def report_of(folder: Path, **packings: str) -> CompareReport:
    """Runs by name: ``none`` and ``padding_free`` on upstream's batches, any other composed."""
    runs = []
    for name, packing in packings.items():
        settings = {} if packing in ("none", "padding_free") else COMPOSITION
        config = {"policy": {"type": "pi05", "device": "cpu"}, "packing": {"name": packing}}
        options = {"settings": settings, "config": config, "packer": packing}
        write_run(folder / name, name, speed=1 if name == "upstream" else 2, first_loss_shift=0.0, **options)
        runs.append(read_run(folder / name))
    return compare_runs(runs)


@pytest.fixture
def report(tmp_path: Path) -> CompareReport:
    return report_of(tmp_path, upstream="none", packed="padding_free", budget="token_budget")


def test_other_samples_are_neither_the_same_function_nor_a_paired_ratio(report: CompareReport) -> None:
    packed, budget = report.pairs
    assert packed.same_samples and packed.same_function
    assert not budget.same_samples
    assert not budget.same_function, "equal losses on other samples prove nothing"
    function, speed = verdicts(report, budget)[:2]
    assert (function.figure, function.kind) == ("other samples", "bad")
    assert speed.figure == f"{budget.samples_ratio:.2f}×"
    assert "steps hold other samples" in speed.sentence
    assert any("composes the batches" in warning for warning in report.warnings)


def test_table_and_page_say_so(report: CompareReport) -> None:
    rows = {label: cells for label, cells in comparison_rows(report) if label is not None}
    assert rows["speed ratio"][2].endswith("a sample, other samples")
    assert rows["largest loss difference"][2] == "other samples"
    assert rows["largest loss difference"][1] != "other samples"
    assert "a sample, other samples" in render_comparison(report)


def test_two_variants_of_one_packing_see_the_same_samples(tmp_path: Path) -> None:
    report = report_of(tmp_path, slow="token_budget", fast="token_budget", other="sequence_length")
    assert [pair.same_samples for pair in report.pairs] == [True, False]


def test_counts_of_a_baseline_are_not_taken_from_other_samples(report: CompareReport) -> None:
    upstream, packed, budget = report.variants
    uncounted = dataclasses.replace(upstream, tokens_computed=None)
    assert with_counts_of(uncounted, [budget]) is uncounted
    assert with_counts_of(uncounted, [budget, packed]).tokens_computed == packed.tokens_upstream
