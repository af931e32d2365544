# SPDX-License-Identifier: Apache-2.0
"""The schedules that are compared, and what each is assumed to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Literal

from embodix_rl.scheduling.streamer import Normalization

Batching = Literal["barrier", "stages", "dynamic", "stock_decoupled"]


@dataclass(frozen=True)
class SimulatedSchedule:
    """How a run's parts are put in time.

    Attributes:
        name: of the schedule.
        assumes: what the model takes it to do, for the reader of its figures.
        num_shards: parts of a worker's environments that ask for actions separately.
        batching: ``barrier``: inference waits for every worker; ``stages``: for every worker's shard of one stage, the
            stages in turn; ``dynamic``: our batcher with `AdaptiveLimits`; ``stock_decoupled``: RLinf's shared queue.
        max_staleness: of the gate; 0 is a barrier between training and generation. None for RLinf's store, which
            does not hold generation back.
        micro_batches: that a global batch is trained in.
        streaming: a micro-batch is worked on when it is full, instead of when the global batch is.
        normalization: of advantages.
        poll_s: the stock trainer looks for data so often.
        reuse_versions: the stock trainer keeps using a trajectory until it is so many versions old.
    """

    name: str
    assumes: str
    num_shards: int = 1
    batching: Batching = "barrier"
    max_staleness: int | None = 0
    micro_batches: int = 16
    streaming: bool = False
    normalization: Normalization = "exact"
    poll_s: float = 1.0
    reuse_versions: int = 1


SYNC = SimulatedSchedule(
    "sync",
    "one shard a worker; each chunk step waits for every worker, then infers all; training waits for the rollout and "
    "the next rollout for training and weights (RLinf's EmbodiedRunner)",
)
PIPELINE = SimulatedSchedule(
    "pipeline (2 stages)",
    "as sync with two stages: one is stepped while the other infers; half the environments take half the time",
    num_shards=2,
    batching="stages",
)
STOCK_ASYNC = SimulatedSchedule(
    "rlinf_async as shipped",
    "generation with a barrier each chunk step and never held back; training looks for data once a second and takes "
    "the newest batch, trained before or not, until it is older than one version; weights stop training",
    max_staleness=None,
)
STOCK_DECOUPLED = SimulatedSchedule(
    "rlinf_async decoupled",
    "as shipped, but rollout takes worker shards from one queue: 20 ms from its call, after which it still waits for "
    "the shard it has asked for; at most one shard a worker",
    batching="stock_decoupled",
    max_staleness=None,
)
NUM_SHARDS = 4  # of rl_vla3: an environment worker steps three while one infers


def rl_vla3(
    async_train: bool, dynamic_batching: bool, streaming: bool, *, max_staleness: int = 1, num_shards: int = NUM_SHARDS
) -> SimulatedSchedule:
    """embodix's schedule with each of its three switches."""
    on = [
        name
        for name, switch in [
            ("async_train", async_train),
            ("dynamic_batching", dynamic_batching),
            ("streaming", streaming),
        ]
        if switch
    ]
    return SimulatedSchedule(
        "rl_vla3 " + (" + ".join(on) or "all off"),
        f"the scheduling core; max_staleness {max_staleness if async_train else 0}, "
        f"{num_shards if dynamic_batching else 1} shard(s) a worker",
        num_shards=num_shards if dynamic_batching else 1,
        batching="dynamic" if dynamic_batching else "barrier",
        max_staleness=max_staleness if async_train else 0,
        streaming=streaming,
    )


def combinations() -> Iterable[SimulatedSchedule]:
    """rl_vla3 with each combination of its switches, all off first."""
    return [rl_vla3(*switches) for switches in product((False, True), repeat=3)]


def released(async_train: bool, dynamic_batching: bool, streaming: bool, workload_waves: int) -> SimulatedSchedule:
    """RL-VLA3 as its authors released it: asynchronous within a global step, with a barrier after each.

    Training takes a wave of trajectories (a rollout epoch) when it is there, without normalisation over the global
    batch; the streamer makes its portions a quarter as large.
    """
    on = [
        name
        for name, switch in [("train async", async_train), ("rollout async", dynamic_batching), ("streamer", streaming)]
        if switch
    ]
    waves = workload_waves * (4 if streaming else 1)
    return SimulatedSchedule(
        "released " + (" + ".join(on) or "all off"),
        f"weights once a global step, which waits for rollout and training; training in {waves} portions",
        num_shards=NUM_SHARDS if dynamic_batching else 1,
        batching="dynamic" if dynamic_batching else "barrier",
        max_staleness=0,
        micro_batches=waves,
        streaming=async_train or streaming,
        normalization="none",
    )
