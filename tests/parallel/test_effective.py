# SPDX-License-Identifier: Apache-2.0
"""What runs is held against what was asked for, from every rank's own report."""

from __future__ import annotations

import pytest

from embodix.contracts import PlacedBytes, RankLayout
from embodix.parallel.effective import NotAsRequestedError, RankReport, require_effective, require_one_run

HALVES = PlacedBytes(sharded=50, replicated=2, optimizer=0, total=100)
WHOLE = PlacedBytes(sharded=0, replicated=100, optimizer=0, total=100)


def _report(rank: int, placed: PlacedBytes = HALVES, strategy: str = "FSDP2", world: int = 2) -> RankReport:
    return RankReport(rank, world, strategy, "gloo", placed)


def test_what_was_asked_for_passes() -> None:
    require_effective("fsdp2", RankLayout(shard=2), [_report(0), _report(1)])
    require_effective("ddp", RankLayout(data=2), [_report(0, WHOLE, "DDP"), _report(1, WHOLE, "DDP")])


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([_report(0, WHOLE), _report(1, WHOLE)], "a rank that holds 100% of the parameters"),
        ([_report(0), _report(1, WHOLE)], "a rank that holds 100% of the parameters"),
        ([_report(0), _report(0)], r"ranks \[0, 0\]"),
        ([_report(0, world=1)], r"2 ranks; what runs has ranks \[0\]"),
        ([_report(0), _report(1, strategy="DDP")], "DDP and FSDP2"),
        ([_report(0, strategy="accelerate's FSDP"), _report(1, strategy="accelerate's FSDP")], "accelerate's FSDP"),
    ],
)
def test_another_layout_is_an_error_with_every_rank(reports: list[RankReport], message: str) -> None:
    with pytest.raises(NotAsRequestedError, match=message) as refused:
        require_effective("fsdp2", RankLayout(shard=2), reports)
    assert str(refused.value).count("rank ") >= len(reports)
    assert "parallel=fsdp2 asks for" in str(refused.value)


def test_processes_that_have_not_found_each_other() -> None:
    require_one_run(2, 2)
    with pytest.raises(NotAsRequestedError, match=r"2 processes were started as one run.*policy\.device=cpu"):
        require_one_run(1, 2)
