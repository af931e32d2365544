# SPDX-License-Identifier: Apache-2.0
"""Schedules on a clock: what each would deliver with declared times of its parts, before any process is started.

Batcher, gate, streamer, weights, protocol and timeline are the real ones; only computing is replaced by sleeping. On a
virtual clock the figures are predictions of a model, and exact for it; on the loop's own clock they include asyncio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from embodix_rl.scheduling.adaptive import AdaptiveLimits
from embodix_rl.scheduling.batcher import BatchLimits, BatchPolicy, DynamicBatcher, FixedLimits, InferenceRequest
from embodix_rl.scheduling.channels import Mailbox
from embodix_rl.scheduling.conductor import Component, Conductor
from embodix_rl.scheduling.protocol import RunProtocol, RunStage
from embodix_rl.scheduling.simulation.parts import (
    ROLLOUT,
    WEIGHT_NAMES,
    BatchSource,
    EnvWorker,
    RolloutWorker,
    StockQueue,
    StockStore,
    StockTrainer,
    Trainer,
    WeightExchange,
    Weights,
)
from embodix_rl.scheduling.simulation.schedules import SimulatedSchedule
from embodix_rl.scheduling.simulation.workload import Workload
from embodix_rl.scheduling.staleness import GateSettings, StalenessGate
from embodix_rl.scheduling.streamer import MicroBatchStreamer
from embodix_rl.scheduling.timeline import Timeline, TimelineSummary, summarize
from embodix_rl.scheduling.weights import WeightMessage, WeightReceiver, WeightSender

Inbox = Mailbox[InferenceRequest[Mailbox[int]]]


@dataclass(frozen=True)
class Simulated:
    """A simulated run.

    Attributes:
        schedule, workload: what was run.
        timeline: its records.
        summary: of its batches after warm-up.
    """

    schedule: SimulatedSchedule
    workload: Workload
    timeline: Timeline
    summary: TimelineSummary

    @property
    def share_of_bound(self) -> float:
        """Fresh frames per second over those of `Workload.bound_s`."""
        return self.summary.fresh_frames_per_s * self.workload.bound_s() / self.workload.frames_per_batch


async def simulate(
    schedule: SimulatedSchedule, workload: Workload, num_batches: int = 8, warm_up_batches: int = 2
) -> Simulated:
    """Run a schedule on the running loop's clock for `num_batches` optimizer steps.

    Raises:
        ValueError: shards that do not divide a worker's environments, or micro-batches its trajectories.
    """
    if workload.num_envs % schedule.num_shards:
        raise ValueError(f"A worker's {workload.num_envs} environments make no {schedule.num_shards} equal shards.")
    timeline = Timeline()
    num_inboxes = schedule.num_shards if schedule.batching == "stages" else 1
    inboxes: list[Inbox] = [Mailbox(ROLLOUT) for _ in range(num_inboxes)]
    num_trajectories = workload.num_env_workers * schedule.num_shards * workload.trajectories_per_batch
    box = Mailbox[WeightMessage](ROLLOUT, depth=1)
    sender = WeightSender([box], WEIGHT_NAMES)
    if schedule.max_staleness is None:
        pacing: Any = StockStore(num_trajectories, schedule.reuse_versions, schedule.poll_s)
        weights = WeightReceiver(Weights(), Weights(), WEIGHT_NAMES, worker=ROLLOUT)
    else:
        pacing = StalenessGate(GateSettings(num_trajectories, schedule.max_staleness, num_batches=num_batches))
        weights = WeightReceiver(Weights(), Weights(), WEIGHT_NAMES, worker=ROLLOUT, on_adopt=pacing.adopt)
        await pacing.adopt(ROLLOUT, 0)
    envs = {
        f"env {index}": EnvWorker(index, workload, inboxes, schedule.num_shards, pacing, timeline)
        for index in range(workload.num_env_workers)
    }
    protocol = _protocol(tuple(envs))
    components: dict[str, Component] = {
        "weights": WeightExchange(workload, sender, box, weights),
        ROLLOUT: RolloutWorker(workload, _source(schedule, workload, inboxes), inboxes, weights, timeline),
        **envs,
    }
    conductor = Conductor(protocol, components)
    components["trainer"] = (
        StockTrainer(workload, pacing, num_batches, sender, weights, timeline, conductor.advanced)
        if isinstance(pacing, StockStore)
        else _trainer(schedule, workload, pacing, sender, timeline, conductor)
    )
    conductor.add("trainer", components["trainer"])
    await conductor.run()
    return Simulated(schedule, workload, timeline, summarize(timeline, warm_up_batches))


def _protocol(envs: tuple[str, ...]) -> RunProtocol:
    stages = [
        RunStage(("weights",)),
        RunStage(("trainer",), ends_run=True),
        RunStage((ROLLOUT,)),
        RunStage(envs, may_end=True),
    ]
    return RunProtocol(stages)


def _trainer(
    schedule: SimulatedSchedule,
    workload: Workload,
    gate: StalenessGate,
    sender: WeightSender,
    timeline: Timeline,
    conductor: Conductor,
) -> Trainer:
    num_trajectories = gate.settings.batch_size
    streamer = MicroBatchStreamer(
        num_trajectories, max(num_trajectories // schedule.micro_batches, 1), normalization=schedule.normalization
    )
    num_micro_batches = min(schedule.micro_batches, num_trajectories)
    return Trainer(
        workload, gate, streamer, num_micro_batches, schedule.streaming, sender, timeline, conductor.advanced
    )


def _source(schedule: SimulatedSchedule, workload: Workload, inboxes: list[Inbox]) -> BatchSource | StockQueue:
    """Who forms the batches of the rollout worker."""
    if schedule.batching == "stock_decoupled":
        return StockQueue(inboxes[0], workload.num_env_workers)
    policies: list[BatchPolicy] = [
        AdaptiveLimits(workload.num_env_workers * schedule.num_shards)
        if schedule.batching == "dynamic"
        else FixedLimits(BatchLimits(workload.num_env_workers, float("inf")))
        for _ in inboxes
    ]
    return BatchSource(
        [DynamicBatcher(inbox, policy, name=ROLLOUT) for inbox, policy in zip(inboxes, policies, strict=True)]
    )
