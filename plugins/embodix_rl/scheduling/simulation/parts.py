# SPDX-License-Identifier: Apache-2.0
"""What paces a simulated run, and its components: they wait as real ones do, and where those compute these sleep."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from embodix_rl.report.spans import Span
from embodix_rl.scheduling.batcher import Batch, DynamicBatcher, InferenceRequest
from embodix_rl.scheduling.channels import ChannelClosed, Mailbox
from embodix_rl.scheduling.protocol import DrainMode
from embodix_rl.scheduling.simulation.workload import Workload
from embodix_rl.scheduling.staleness import FinishedSample, StalenessGate, Ticket
from embodix_rl.scheduling.streamer import MicroBatchStreamer, Prepare, StreamedSample, Train, Work
from embodix_rl.scheduling.timeline import Timeline
from embodix_rl.scheduling.weights import Part, WeightMessage, WeightReceiver, WeightSender


@dataclass
class Trajectory:
    """One shard's trajectory.

    Attributes:
        frames: environment frames.
        oldest: the oldest version of its actions.
        num_uses: global batches that trained on it.
        sequence: order of arrival, for the store.
    """

    frames: int
    oldest: int
    num_uses: int = 0
    sequence: int = 0


class Pacing(Protocol):
    """What an environment worker asks before a trajectory and tells after it; see `StalenessGate`."""

    async def admit(self, who: str) -> Ticket | None: ...

    async def finish(self, finished: FinishedSample) -> None: ...


class StockStore:
    """RLinf 0.3's `PriorityStore` with its receiver, as they behave: nothing paces, and reading removes nothing.

    It keeps the `size` newest trajectories by their oldest version; what it drops without a use is counted. A
    trajectory older than `reuse_versions` is dropped when it arrives and when the trainer looks.
    """

    def __init__(self, size: int, reuse_versions: int, poll_s: float) -> None:
        self._size, self._reuse_versions, self._poll_s = size, reuse_versions, poll_s
        self._stored: list[Trajectory] = []
        self._num_tickets = 0
        self.version = 0
        self.discarded_frames = 0

    async def admit(self, who: str) -> Ticket | None:
        """Always."""
        self._num_tickets += 1
        return Ticket(self._num_tickets, self.version, self.version, who)

    async def finish(self, finished: FinishedSample) -> None:
        arrived: Trajectory = finished.payload
        arrived.sequence = finished.ticket.number
        self._stored.append(arrived)
        self._stored.sort(key=lambda one: (one.oldest, one.sequence))
        self._drop_old()
        if len(self._stored) > self._size:
            self._drop(self._stored[:1])

    async def batch(self) -> Sequence[Trajectory]:
        """The newest trajectories, used or not, when the store is full; it looks every `poll_s`."""
        while True:
            self._drop_old()
            if len(self._stored) >= self._size:
                return list(self._stored[-self._size :])
            await asyncio.sleep(self._poll_s)

    def _drop_old(self) -> None:
        self._drop([one for one in self._stored if one.oldest < self.version - self._reuse_versions])

    def _drop(self, dropped: Sequence[Trajectory]) -> None:
        self.discarded_frames += sum(one.frames for one in dropped if not one.num_uses)
        self._stored = [one for one in self._stored if one not in dropped]


NUM_WEIGHT_PARTS = 4
WEIGHT_NAMES = [f"part {index}" for index in range(NUM_WEIGHT_PARTS)]
ROLLOUT = "rollout 0"


class SimulatedPart:
    """A component without a process: nothing to start or to kill."""

    async def start(self) -> None: ...

    async def drain(self, mode: DrainMode) -> None:
        """Ends by itself when its neighbours have."""

    async def kill(self) -> None: ...


class EnvWorker(SimulatedPart):
    """Steps the shards of one worker, one at a time; each asks for actions by itself."""

    def __init__(
        self,
        index: int,
        workload: Workload,
        inboxes: Sequence[Mailbox[InferenceRequest[Mailbox[int]]]],
        num_shards: int,
        pacing: Pacing,
        timeline: Timeline,
    ) -> None:
        self._who, self._index, self._workload = f"env {index}", index, workload
        self._inboxes, self._num_shards, self._pacing, self._timeline = inboxes, num_shards, pacing, timeline
        self._process = asyncio.Lock()
        self._shards: list[asyncio.Task[None]] = []
        self._idle_since = 0.0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as shards:
            for shard in range(self._num_shards):
                name = f"{self._who} shard {shard}"
                self._shards.append(shards.create_task(self._run_shard(shard), name=name))

    async def drain(self, mode: DrainMode) -> None:
        """RLinf's workers generate until they are cancelled."""
        if isinstance(self._pacing, StockStore):
            for shard in self._shards:
                shard.cancel()

    async def _run_shard(self, shard: int) -> None:
        workload, loop = self._workload, asyncio.get_running_loop()
        inbox, actions = self._inboxes[shard % len(self._inboxes)], Mailbox[int](f"{self._who} shard {shard}")
        step_s = workload.step_times(self._index, shard, self._num_shards)
        num_envs, worked_s = workload.num_envs // self._num_shards, None
        while (ticket := await self._pacing.admit(self._who)) is not None:
            versions, admitted_at = [], loop.time()
            for _ in range(workload.num_steps):
                await asyncio.sleep(workload.message_s)
                name = f"{self._index}.{shard}"
                await inbox.send(InferenceRequest(actions, num_envs, name, self._who, loop.time(), worked_s))
                versions.append(await actions.receive())
                worked_s = step_s()
                await self._step(worked_s, admitted_at)
            frames = num_envs * workload.chunk * workload.num_steps
            await self._pacing.finish(FinishedSample(ticket, Trajectory(frames, min(versions))))

    async def _step(self, seconds: float, admitted_at: float) -> None:
        async with self._process:
            now, idle = asyncio.get_running_loop().time(), self._idle_since
            paused_until = min(max(admitted_at, idle), now)
            self._wait("leave to generate", idle, paused_until, "trainer")
            self._wait("actions", paused_until, now, ROLLOUT)
            with self._timeline.busy(self._who, "step"):
                await asyncio.sleep(seconds)
            self._idle_since = asyncio.get_running_loop().time()

    def _wait(self, what: str, begin: float, end: float, whom: str) -> None:
        if end > begin:
            self._timeline.spans.append(Span(self._who, what, begin, end, whom))


class Weights:
    """The weights of a simulated model: which version each part has."""

    def __init__(self) -> None:
        self.versions = [0] * NUM_WEIGHT_PARTS

    def write(self, part: Part) -> None:
        self.versions[part.index] = part.payload


class BatchSource:
    """Gives the next batch of requests to the server; `batchers` take turns."""

    def __init__(self, batchers: Sequence[DynamicBatcher[Mailbox[int]]]) -> None:
        self._batchers, self._turn = batchers, 0

    async def next_batch(self) -> Batch[Mailbox[int]]:
        self._turn = (self._turn + 1) % len(self._batchers)
        return await self._batchers[self._turn - 1].next_batch()

    def observe(self, batch: Batch[Mailbox[int]], inference_s: float) -> None:
        self._batchers[self._turn - 1].observe(batch, inference_s)


class StockQueue:
    """RLinf 0.3's decoupled receive: 20 ms from the call, then the shard that was asked for, however long it takes."""

    TIMEOUT_S = 0.02

    def __init__(self, inbox: Mailbox[InferenceRequest[Mailbox[int]]], most: int) -> None:
        self._inbox, self._most = inbox, most

    async def next_batch(self) -> Batch[Mailbox[int]]:
        loop = asyncio.get_running_loop()
        deadline, requests = loop.time() + self.TIMEOUT_S, [await self._inbox.receive()]
        while len(requests) < self._most and loop.time() < deadline:
            requests.append(await self._inbox.receive())
        now = loop.time()
        return Batch(tuple(requests), tuple(request.sent_at or now for request in requests), now, "full")

    def observe(self, batch: Batch[Mailbox[int]], inference_s: float) -> None:
        """Nothing is learned."""


class RolloutWorker(SimulatedPart):
    """Computes actions, each batch with the one version that is in use when it begins."""

    def __init__(
        self,
        workload: Workload,
        source: BatchSource | StockQueue,
        inboxes: Sequence[Mailbox[InferenceRequest[Mailbox[int]]]],
        weights: WeightReceiver[Weights],
        timeline: Timeline,
    ) -> None:
        self._workload, self._source, self._inboxes = workload, source, inboxes
        self._weights, self._timeline = weights, timeline
        self._answers: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        while True:
            try:
                with self._timeline.wait(ROLLOUT, "env workers", "a batch"):
                    batch = await self._source.next_batch()
            except ChannelClosed:
                return
            await self._infer(batch)

    async def drain(self, mode: DrainMode) -> None:
        for inbox in self._inboxes:
            await inbox.close()

    async def _infer(self, batch: Batch[Mailbox[int]]) -> None:
        seconds = self._workload.inference_s(batch.num_samples)
        async with self._weights.use() as (version, buffer):
            with self._timeline.busy(ROLLOUT, "infer"):
                await asyncio.sleep(seconds)
            assert set(buffer.versions) == {version}
        for request in batch.requests:
            answer = asyncio.create_task(self._answer(request.payload, version))
            self._answers.add(answer)
            answer.add_done_callback(self._answers.discard)
        self._source.observe(batch, seconds)

    async def _answer(self, actions: Mailbox[int], version: int) -> None:
        await asyncio.sleep(self._workload.message_s)
        await actions.send(version)


class Trainer(SimulatedPart):
    """Trains global batches from the gate, streaming or not, and offers each version."""

    def __init__(
        self,
        workload: Workload,
        gate: StalenessGate,
        streamer: MicroBatchStreamer,
        num_micro_batches: int,
        streaming: bool,
        sender: WeightSender,
        timeline: Timeline,
        advanced: Callable[[int], None],
    ) -> None:
        self._workload, self._gate, self._streamer, self._streaming = workload, gate, streamer, streaming
        self._micro_batch_s = workload.train_s / num_micro_batches
        self._sender, self._timeline, self._advanced = sender, timeline, advanced

    async def run(self) -> None:
        gate = self._gate
        while not gate.is_over:
            trajectories = await self._train_batch()
            ages = Counter(gate.version - trajectory.oldest for trajectory in trajectories)
            frames = sum(trajectory.frames for trajectory in trajectories)
            self._timeline.trained(gate.version, frames, frames, ages)
            await gate.advance(gate.version + 1)
            self._advanced(gate.version)
            self._sender.offer(gate.version, [gate.version] * NUM_WEIGHT_PARTS)

    async def _train_batch(self) -> list[Trajectory]:
        batch, taken = self._gate.filling, list[Trajectory]()
        held: list[Work] = []
        while self._gate.filling == batch:
            with self._timeline.wait("trainer", "env workers", f"samples of batch {batch}"):
                finished = await self._gate.take()
            taken.append(finished.payload)
            held += self._streamer.add(StreamedSample(finished.payload))
            if self._streaming:
                await self._do(held)
                held = []
        await self._do(held)
        return taken

    async def _do(self, work: Sequence[Work]) -> None:
        prepare_share = self._workload.prepare_share
        for one in work:
            if isinstance(one, Prepare):
                await self._compute("prepare", self._micro_batch_s * prepare_share)
            elif isinstance(one, Train):
                await self._compute("train", self._micro_batch_s * (1 - prepare_share))

    async def _compute(self, what: str, seconds: float) -> None:
        with self._timeline.busy("trainer", what):
            await asyncio.sleep(seconds)


class StockTrainer(SimulatedPart):
    """RLinf's asynchronous actor: the newest batch of the store, then weights, which it waits for."""

    def __init__(
        self,
        workload: Workload,
        store: StockStore,
        num_steps: int,
        sender: WeightSender,
        weights: WeightReceiver[Weights],
        timeline: Timeline,
        advanced: Callable[[int], None],
    ) -> None:
        self._workload, self._store, self._num_steps = workload, store, num_steps
        self._sender, self._weights, self._timeline, self._advanced = sender, weights, timeline, advanced

    async def run(self) -> None:
        for step in range(self._num_steps):
            with self._timeline.wait("trainer", "env workers", f"samples of batch {step}"):
                batch = await self._store.batch()
            fresh = sum(trajectory.frames for trajectory in batch if not trajectory.num_uses)
            ages = Counter(step - trajectory.oldest for trajectory in batch)
            for trajectory in batch:
                trajectory.num_uses += 1
            with self._timeline.busy("trainer", "train"):
                await asyncio.sleep(self._workload.train_s)
            self._timeline.trained(step, sum(trajectory.frames for trajectory in batch), fresh, ages)
            self._store.version = step + 1
            self._advanced(step + 1)
            self._sender.offer(step + 1, [step + 1] * NUM_WEIGHT_PARTS)
            with self._timeline.wait("trainer", ROLLOUT, "the weights to arrive"):
                await self._weights.wait_for_version(step + 1)
        self._timeline.discarded_frames = self._store.discarded_frames


class WeightExchange(SimulatedPart):
    """Carries parts from the trainer to the rollout worker and brings complete versions into use."""

    def __init__(
        self,
        workload: Workload,
        sender: WeightSender,
        box: Mailbox[WeightMessage],
        weights: WeightReceiver[Weights],
    ) -> None:
        self._part_s = workload.weights_s / NUM_WEIGHT_PARTS
        self._sender, self._box, self._weights = sender, box, weights

    async def run(self) -> None:
        async with asyncio.TaskGroup() as both:
            both.create_task(self._send(), name="weights sending")
            both.create_task(self._carry(), name="weights arriving")

    async def drain(self, mode: DrainMode) -> None:
        self._sender.close()

    async def _send(self) -> None:
        await self._sender.run()
        await self._box.close()

    async def _carry(self) -> None:
        while True:
            try:
                message: Any = await self._box.receive()
            except ChannelClosed:
                return
            if isinstance(message, Part):
                await asyncio.sleep(self._part_s)
            await self._weights.accept(message)
            if self._weights.ready_version is not None:
                await self._weights.adopt()
