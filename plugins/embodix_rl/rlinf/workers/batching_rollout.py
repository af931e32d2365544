# SPDX-License-Identifier: Apache-2.0
"""RLinf's inference worker that batches what is there, with two models that take turns as weights arrive."""

from __future__ import annotations

import asyncio
import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

from embodix_rl.rlinf.extension import activate

activate("rollout")  # before RLinf's modules are imported, hence the order below

import torch  # noqa: E402
from rlinf.data.embodied_io_struct import RolloutResult  # noqa: E402
from rlinf.workers.rollout.hf.huggingface_worker import MultiStepRolloutWorker  # noqa: E402

from embodix_rl.rlinf.asynchronous.exchange import (  # noqa: E402
    EVALUATION_REQUESTS,
    EVENTS,
    REQUESTS,
    Adopted,
    ChannelReceive,
    ChannelSend,
    Event,
    ModelBuffer,
    allow_many_waits,
    answers_key,
    weights_key,
)
from embodix_rl.rlinf.workers.rollout import TimedInference  # noqa: E402
from embodix_rl.scheduling.adaptive import AdaptiveLimits  # noqa: E402
from embodix_rl.scheduling.batcher import (  # noqa: E402
    Batch,
    BatchLimits,
    BatchPolicy,
    DynamicBatcher,
    FixedLimits,
    InferenceRequest,
)
from embodix_rl.scheduling.channels import Mailbox, Receive  # noqa: E402
from embodix_rl.scheduling.weights import WeightMessage, WeightReceiver  # noqa: E402

Mode = Literal["train", "eval"]  # of actions: drawn, or without noise


class BatchingRollout(TimedInference, MultiStepRolloutWorker):
    """Answers requests in batches, each with exactly one policy version.

    Inference runs in a thread of its own, so that requests and weights arrive meanwhile.
    """

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self._settings = cfg.embodix.rl_vla3
        self._name = f"rollout {self._rank}"
        self._inference = ThreadPoolExecutor(1, thread_name_prefix="inference")
        self._tasks: list[asyncio.Future[Any]] = []

    def init_worker(self) -> None:
        """RLinf builds the model, twice."""
        super().init_worker()
        self._front = ModelBuffer(self.hf_model)
        super().init_worker()
        self._back = ModelBuffer(self.hf_model)

    async def prepare(self, input_channel: Any, event_channel: Any, version: int) -> None:
        """Receive weights from now on; returns when `version` is in use."""
        allow_many_waits()
        events = ChannelSend[Event](event_channel, EVENTS)

        async def adopt(worker: str, adopted: int) -> None:
            await events.send(Adopted(worker, adopted))

        self._weights = WeightReceiver(
            self._front,
            self._back,
            self._front.names,
            version=version - 1,
            worker=self._name,
            on_adopt=adopt,
            deadline_s=self._settings.deadline_s,
        )
        messages = ChannelReceive[WeightMessage](input_channel, weights_key(self._rank))
        self._tasks.append(asyncio.ensure_future(self._keep_receiving(messages)))
        await self._weights.wait_for_version(version)
        await self._weights.adopt()

    async def generate(self, input_channel: Any, output_channel: Any) -> None:
        """Answer requests until `stop`."""
        inbox = Mailbox[InferenceRequest[Any]](self._name, self._share_of_shards(), self._settings.deadline_s)
        requests = ChannelReceive[InferenceRequest[Any]](input_channel, REQUESTS)
        batcher = DynamicBatcher(inbox, self._limits(), name=self._name, deadline_s=self._settings.deadline_s)
        self._tasks.append(asyncio.ensure_future(_fetch(requests, inbox)))
        self._tasks.append(asyncio.ensure_future(self._serve(batcher, output_channel, "train")))
        if self.cfg.runner.val_check_interval > 0:
            self._serve_evaluation(input_channel, output_channel)
        try:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except asyncio.CancelledError:
            pass  # `stop` was called

    def stop(self) -> None:
        """Answer nothing more."""
        for task in self._tasks:
            task.cancel()

    async def _keep_receiving(self, messages: ChannelReceive[WeightMessage]) -> None:
        """A complete version comes into use at once, or after the running inference."""
        while True:
            message = await messages.receive()
            with self.timeline_span("weights"):
                await self._weights.accept(message)
            if self._weights.ready_version is not None:
                await self._weights.adopt()

    def _serve_evaluation(self, input_channel: Any, output_channel: Any) -> None:
        """Answer requests of evaluations too, in batches of their own: whatever is there, whenever it comes."""
        num_stages = self._num_shards()  # of evaluation there are as many
        limits = FixedLimits(BatchLimits(num_stages, 0.0))
        inbox = Mailbox[InferenceRequest[Any]](self._name, num_stages, self._settings.deadline_s)
        batcher = DynamicBatcher(inbox, limits, name=self._name, clients="evaluations", deadline_s=float("inf"))
        requests = ChannelReceive[InferenceRequest[Any]](input_channel, EVALUATION_REQUESTS)
        self._tasks.append(asyncio.ensure_future(_fetch(requests, inbox)))
        self._tasks.append(asyncio.ensure_future(self._serve(batcher, output_channel, "eval")))

    async def _serve(self, batcher: DynamicBatcher[Any], output_channel: Any, mode: Mode) -> None:
        answers: set[asyncio.Future[None]] = set()
        while True:
            with self.timeline_span("wait") if mode == "train" else nullcontext():
                batch = await batcher.next_batch()
            begun = time.perf_counter()
            results = await self._infer(batch, mode)
            for request, result in zip(batch.requests, results, strict=True):
                channel = ChannelSend[RolloutResult](output_channel, answers_key(request.client))
                answer = asyncio.ensure_future(channel.send(result))
                answers.add(answer)
                answer.add_done_callback(answers.discard)
            batcher.observe(batch, time.perf_counter() - begun)

    def _num_shards(self) -> int:
        return int(self.placement.get_world_size("env") * self.num_pipeline_stages)

    def _share_of_shards(self) -> int:
        """Requests that a worker may hold; more would be kept from other workers, which may be free."""
        return math.ceil(self._num_shards() / self.placement.get_world_size("rollout"))

    def _limits(self) -> BatchPolicy:
        settings = self._settings
        if not settings.dynamic_batching:
            return FixedLimits(BatchLimits(self.placement.get_world_size("env"), float("inf")))
        most = settings.max_batch or self._num_shards()
        if settings.max_wait_s is None:
            return AdaptiveLimits(most)
        return FixedLimits(BatchLimits(most, settings.max_wait_s))

    async def _infer(self, batch: Batch[Any], mode: Mode) -> list[RolloutResult]:
        loop = asyncio.get_running_loop()
        async with self._weights.use() as (version, buffer):
            return await loop.run_in_executor(self._inference, self._compute, batch, version, buffer, mode)

    def _compute(self, batch: Batch[Any], version: int, buffer: ModelBuffer, mode: Mode) -> list[RolloutResult]:
        self.hf_model, self.version = buffer.model, version
        merged = self._merge_obs_batches([request.payload for request in batch.requests])
        actions, result = self.predict(merged["obs"], mode)
        sizes = [request.size for request in batch.requests]
        if mode == "eval":
            versions = torch.full((len(actions), 1), float(version))
            return list(self._split_rollout_result(RolloutResult(actions=actions.cpu(), versions=versions), sizes))
        answer = RolloutResult(
            actions=actions,
            prev_logprobs=result["prev_logprobs"],
            prev_values=result["prev_values"],
            bootstrap_values=self.get_bootstrap_values(merged["final_obs"]),
            forward_inputs=result["forward_inputs"],
            versions=torch.full_like(result["prev_logprobs"], float(version), dtype=torch.float32),
        )
        return list(self._split_rollout_result(answer, sizes))


async def _fetch(requests: Receive[InferenceRequest[Any]], inbox: Mailbox[InferenceRequest[Any]]) -> None:
    """Receive what is sent, so that it is here when a batch is formed: a receive from RLinf's channel takes
    milliseconds even where something waits, and the batcher posts one at a time.

    A request counts from its arrival on this process's clock."""
    clock = asyncio.get_running_loop().time
    while True:
        request = await requests.receive()
        await inbox.send(replace(request, sent_at=clock()))
