# SPDX-License-Identifier: Apache-2.0
"""What is exchanged is counted, with sizes known beforehand, on two ranks of which one is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from embodix.parallel.communication import CommunicationCounter, Traffic, kind_of

WIDTH, FLOAT = 100, 4


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process as one of two, whose exchanges go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def counted(action: Callable[[], object]) -> dict[str, Traffic]:
    with CommunicationCounter() as counter:
        action()
    return counter.traffic


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (lambda: dist.all_reduce(torch.zeros(10)), {"all-reduce": Traffic(1, 10 * FLOAT)}),
        (lambda: dist.all_reduce(torch.zeros(10, dtype=torch.bfloat16)), {"all-reduce": Traffic(1, 20)}),
        (
            lambda: dist.all_gather_into_tensor(torch.zeros(20), torch.zeros(10)),
            {"all-gather": Traffic(1, 20 * FLOAT)},
        ),
        (
            lambda: dist.all_gather([torch.zeros(10), torch.zeros(10)], torch.zeros(10)),
            {"all-gather": Traffic(1, 20 * FLOAT)},
        ),
        (
            lambda: dist.reduce_scatter_tensor(torch.zeros(10), torch.zeros(20)),
            {"reduce-scatter": Traffic(1, 20 * FLOAT)},
        ),
        (lambda: dist.broadcast(torch.zeros(7), 0), {"broadcast": Traffic(1, 7 * FLOAT)}),
        (lambda: functional.all_reduce(torch.zeros(7), "sum", dist.group.WORLD) + 1, {"all-reduce": Traffic(1, 28)}),
        (
            lambda: functional.all_gather_tensor(torch.zeros(7), 0, dist.group.WORLD) + 1,
            {"all-gather": Traffic(1, 14 * FLOAT)},
        ),
        (
            lambda: functional.reduce_scatter_tensor(torch.zeros(14), "sum", 0, dist.group.WORLD) + 1,
            {"reduce-scatter": Traffic(1, 14 * FLOAT)},
        ),
        (lambda: dist.barrier(), {}),
        (lambda: torch.zeros(10) + 1, {}),
    ],
)
def test_a_call_counts_its_whole_tensor(
    two_ranks: None, action: Callable[[], object], expected: dict[str, Traffic]
) -> None:
    assert counted(action) == expected


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process alone, whose exchanges are carried out."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_buckets_that_ddp_reduces_in_its_own_code_are_counted(alone: None) -> None:
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH, bias=False))
    found = counted(lambda: model(torch.randn(3, WIDTH)).sum().backward())
    assert found == {"all-reduce": Traffic(1, WIDTH * WIDTH * FLOAT)}


def test_a_sharded_layer_is_gathered_and_its_gradient_scattered(two_ranks: None) -> None:
    inner = nn.Linear(WIDTH, WIDTH, bias=False)
    root = nn.Sequential(inner, nn.Linear(WIDTH, 1, bias=False))
    fully_shard(inner)
    fully_shard(root)
    found = counted(lambda: root(torch.randn(3, WIDTH)).sum().backward())
    layer, last = WIDTH * WIDTH * FLOAT, WIDTH * 2 * FLOAT  # one row of the last is filled up to a row for each rank
    assert found["all-gather"] == Traffic(3, 2 * layer + last), "the inner layer forward and backward, the root once"
    assert found["reduce-scatter"].num_calls == 2
    assert found["reduce-scatter"].num_bytes == layer + last


def test_nothing_is_counted_outside_of_the_context(two_ranks: None) -> None:
    counter = CommunicationCounter()
    dist.all_reduce(torch.zeros(10))
    assert counter.traffic == {}


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        *(("_allgather_base_", "all-gather"), ("all_gather_into_tensor_coalesced", "all-gather")),
        *(("allreduce_", "all-reduce"), ("_reduce_scatter_base_", "reduce-scatter"), ("reduce_", "reduce")),
        *(("alltoall_base_", "all-to-all"), ("scatter_", "scatter"), ("recv_any_source_", "receive")),
        ("shuffle_", "shuffle"),
    ],
)
def test_operators_are_named_by_kind(operator: str, kind: str) -> None:
    assert kind_of(operator) == kind
