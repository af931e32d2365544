# SPDX-License-Identifier: Apache-2.0
"""What tensor parallel refuses, and which layers the plans of the policies cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from parallel_cases import CASES, SOUND_RUN
from torch import nn

from embodix.contracts import PolicySupport, RankLayout, TensorPlan
from embodix.parallel.tensor import TensorParallelStrategy
from embodix.parallel.tensor_cuts import planned_cuts, require_divisible
from embodix.policies.support import support_of

HALVES = RankLayout(tensor=2)


@pytest.mark.parametrize(
    ("options", "num_processes", "layout"),
    [
        ({}, 4, RankLayout(tensor=4)),
        ({"size": 2}, 4, RankLayout(data=2, tensor=2)),
        ({"size": 2, "shard": 2}, 8, RankLayout(data=2, shard=2, tensor=2)),
        ({"shard": 2}, 4, RankLayout(shard=2, tensor=2)),
    ],
)
def test_ranks_are_arranged(options: dict[str, Any], num_processes: int, layout: RankLayout) -> None:
    assert TensorParallelStrategy(**options).layout(num_processes) == layout


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"size": 3}, ("parallel.options.size", "got 3 for 4", "one of 1, 2, 4")),
        ({"size": 4, "shard": 2}, ("parallel.options.size", "got 4 for 2", "one of 1, 2")),
        ({"shard": 3}, ("parallel.options.shard", "got 3 for 4")),
    ],
)
def test_other_arrangements_are_refused(options: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as refused:
        TensorParallelStrategy(**options).layout(4)
    assert all(part in str(refused.value) for part in parts)


@pytest.mark.parametrize(
    ("traits", "layout", "parts"),
    [
        ({}, RankLayout(data=2), ("2 ranks at least", "got 1", "parallel=ddp")),
        ({"packed": False}, HALVES, ("packed computation", "packing=none", "+plugin=embodix")),
        ({"precision": "fp8_block"}, HALVES, ("plain linear layers", "precision=fp8_block", "parallel=fsdp2")),
        ({"support": PolicySupport("act")}, HALVES, ("no plan", "parallel=ddp")),
    ],
)
def test_runs_that_it_cannot_train(traits: dict[str, Any], layout: RankLayout, parts: tuple[str, ...]) -> None:
    (fault,) = TensorParallelStrategy().faults(dataclasses.replace(SOUND_RUN, **traits), layout)
    assert all(part in fault for part in parts), fault


def test_a_run_that_it_can_train() -> None:
    assert list(TensorParallelStrategy().faults(SOUND_RUN, HALVES)) == []


def test_heads_are_shared_out_evenly() -> None:
    require_divisible({"query heads": 8, "key/value heads": 2}, 2)
    with pytest.raises(ValueError, match=r"got 2 key/value heads for 4 ranks. .*size=2"):
        require_divisible({"query heads": 8, "key/value heads": 2}, 4)


@pytest.mark.parametrize("name", CASES)
def test_plans_match_their_policy(name: str) -> None:
    policy = CASES[name].build()
    plan = support_of(policy.config.type).tensor_plan(policy)
    cuts = planned_cuts(policy, plan)
    whole = sum(parameter.numel() for parameter in policy.parameters())
    cut = sum(p.numel() for path in cuts for p in policy.get_submodule(path).parameters(recurse=False))
    assert cut > 0.8 * whole
    assert set(cuts.values()) >= {"columns", "rows", "rows_of_whole", "gathered_columns"}


def test_a_pattern_without_a_match_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'0\.other' does not"):
        planned_cuts(nn.Sequential(nn.Linear(2, 2)), TensorPlan(rows=("0.other",)))


def test_a_layer_is_cut_in_one_way() -> None:
    with pytest.raises(ValueError, match="'0' is in both columns and rows"):
        planned_cuts(nn.Sequential(nn.Linear(2, 2)), TensorPlan(columns=("0",), rows=("0",)))
