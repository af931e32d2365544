# SPDX-License-Identifier: Apache-2.0
"""A sweep's runs are named by what tells them apart."""

from __future__ import annotations

from embodix.cli.sweep import distinguishing_names


def test_runs_are_named_by_the_overrides_they_do_not_share() -> None:
    shared = ["policy=pi05_small", "train.steps=2"]
    jobs = [[*shared, "+plugin=none"], [*shared, "+plugin=embodix", "attention=upstream"], shared]
    assert distinguishing_names(jobs) == ["plugin=none", "plugin=embodix attention=upstream", "run"]


def test_alike_runs_are_numbered() -> None:
    assert distinguishing_names([["a=1"], ["a=1"], ["a=2"]]) == ["a=1 #0", "a=1 #1", "a=2"]
