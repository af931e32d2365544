# SPDX-License-Identifier: Apache-2.0
"""Bytes that are counted on the meta device are those that ranks hold, to the byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from embodix import plugins
from embodix.contracts import PlacedBytes, PolicySupport, RankLayout, ShardUnit, StepUse
from embodix.costs.counting import CountedAttention, count_step
from embodix.packing.layout import PaddingFreePacker
from embodix.parallel.rank_bytes import chunk_bytes, replicated_rank_bytes, sharded_rank_bytes
from embodix.policies.settings import FastPathSettings
from embodix.policies.support import support_of

from .parallel_cases import CASES

NUM_RANKS = 2


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """What two ranks hold after a step of each policy under DDP and FSDP2."""
    folder = tmp_path_factory.mktemp("placed")
    script = Path(__file__).with_name("placed_bytes_rank.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={NUM_RANKS}"]
    done = subprocess.run([*command, script, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def counted_use(policy, case, support: PolicySupport) -> StepUse:
    """A counted step of a policy on the meta device."""
    batch = {
        key: value.to("meta") if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in case.batch(policy, 0).items()
    }
    policy, attention = policy.to("meta"), CountedAttention()
    installation = case.wrapper().install(policy, FastPathSettings(PaddingFreePacker(), attention))
    entries = {unit.entry: policy.get_submodule(unit.entry) for unit in support.shard_units(policy)}
    use = count_step(policy, batch, attention, (), entries).use
    installation.uninstall()
    return use


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_ranks_hold_is_what_was_counted(name, measured):
    case = CASES[name]
    policy = case.build()
    support = support_of(policy.config.type)
    use = counted_use(policy, case, support)
    assert use.gradients
    for strategy_name in ("ddp", "fsdp2"):
        strategy = plugins.build("parallel_strategies", strategy_name, {})
        for rank in range(NUM_RANKS):
            found = PlacedBytes(**json.loads((measured / f"{name}-{strategy_name}-{rank}.json").read_text()))
            counted = strategy.rank_bytes(policy, strategy.layout(NUM_RANKS), support, use, rank)
            assert counted.placed == found
            assert found.optimizer > 0


class Stack(nn.Module):
    """Two layers of 5 x 4 and 3 x 5 and a head that the root holds, 2 x 3; all without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5, bias=False), nn.Linear(5, 3, bias=False)
        self.unread = nn.Linear(7, 7, bias=False)
        self.head = nn.Linear(3, 2, bias=False)


UNITS = [ShardUnit((path,), path) for path in ("first", "unread", "second")]
USE = StepUse(frozenset({"first.weight", "second.weight", "head.weight"}), {"first": False, "second": True})


def test_a_chunk_is_torchs_own():
    for rows, ranks in ((5, 2), (5, 4), (3, 4), (8, 4), (1, 3)):
        tensor = torch.zeros(rows, 3)
        chunks = [chunk.numel() * 4 for chunk in torch.chunk(tensor, ranks)]
        found = [chunk_bytes(tensor, ranks, rank) for rank in range(ranks)]
        assert found == chunks + [0] * (ranks - len(chunks))


def test_what_two_ranks_cut_hold_and_send():
    first, last = (sharded_rank_bytes(Stack(), UNITS, RankLayout(shard=2), USE, rank) for rank in (0, 1))
    # Rows of 5, 3, 2 and 7 are cut into 3 + 2, 2 + 1, 1 + 1 and 4 + 3.
    assert first.placed == PlacedBytes(4 * (12 + 10 + 3 + 28), 0, 8 * (12 + 10 + 3) + 3 * 4, 4 * (20 + 15 + 6 + 49))
    assert last.placed.sharded == 4 * (8 + 5 + 3 + 21)
    assert (first.gradients, last.gradients) == (4 * 25, 4 * 16)
    assert first.sent == {
        "all-gather forward": 4 * (12 + 10 + 3),
        "all-gather backward": 4 * 10,
        "reduce-scatter of gradients": 4 * (12 + 10 + 3),
    }
    # The head and its gradient, both layers, and the gradient of the larger one, padded to two equal chunks.
    assert first.exchange == 2 * 4 * (3 + 3 + (12 + 10) + 12)


def test_copies_of_what_is_cut_reduce_their_parts():
    found = sharded_rank_bytes(Stack(), UNITS, RankLayout(data=4, shard=2), USE)
    assert found.sent["all-reduce of gradients"] == 2 * 3 * 4 * (12 + 10 + 3) // 4


def test_copies_are_reduced_with_what_gets_no_gradient():
    alone, copied = replicated_rank_bytes(Stack(), 1, USE), replicated_rank_bytes(Stack(), 4, USE)
    assert (alone.sent, alone.exchange) == ({}, 0)
    assert copied.placed == alone.placed == PlacedBytes(0, 4 * 90, 8 * 41 + 12, 4 * 90)
    assert copied.exchange == 4 * 90
    assert copied.sent == {"all-reduce of gradients": 2 * 3 * 4 * 90 // 4}
