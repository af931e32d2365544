# SPDX-License-Identifier: Apache-2.0
"""Variants that share ranks: which may, and how each is started by itself."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from embodix.contracts import RankLayout
from embodix.parallel.choice import ParallelChoice
from embodix.training.variant_ranks import (
    on_several_machines,
    rank_launcher,
    require_same_samples,
    without_launcher,
)


def session(name: str, **layout: int) -> Any:
    return SimpleNamespace(name=name, parallel=ParallelChoice(name, layout=RankLayout(**layout)))


def test_copies_and_shards_draw_the_same_samples() -> None:
    require_same_samples([session("ddp", data=4), session("fsdp2", shard=4), session("hybrid", data=2, shard=2)])


def test_ranks_that_share_samples_are_not_compared_with_ranks_that_do_not() -> None:
    with pytest.raises(ValueError, match=r"'ddp' \(parallel=ddp\) 4 have, in 'tensor' \(parallel=tensor\) 2"):
        require_same_samples([session("ddp", data=4), session("tensor", data=2, tensor=2)])


def test_a_process_that_is_no_rank_has_nothing_of_the_launcher() -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1", "ROLE_RANK": "0"}
    launched |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMPI_COMM_WORLD_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    kept = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "bf16"}
    assert without_launcher({**launched, **kept}) == kept


def test_as_many_ranks_are_started_as_there_are() -> None:
    assert rank_launcher(1) == [sys.executable]
    assert rank_launcher(3)[-1] == "--nproc_per_node=3"


@pytest.mark.parametrize(("local", "several"), [("2", True), ("4", False), (None, False)])
def test_ranks_elsewhere_are_noticed(monkeypatch: pytest.MonkeyPatch, local: str | None, several: bool) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert on_several_machines() is several
