# SPDX-License-Identifier: Apache-2.0
"""Clients that ask, wait and are stepped, around one server: the load of a rollout worker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from embodix_rl.scheduling.batcher import Batch, BatchPolicy, DynamicBatcher, InferenceRequest
from embodix_rl.scheduling.channels import Mailbox

Step = Callable[[], float]


def constant(seconds: float) -> Step:
    return lambda: seconds


def lognormal(mean_s: float, sigma: float, seed: int) -> Step:
    draws = random.Random(seed)
    return lambda: mean_s * draws.lognormvariate(-sigma * sigma / 2, sigma)


@dataclass
class Served:
    """What a server did: batches with the time that each was answered."""

    batches: list[tuple[float, Batch[Any]]] = field(default_factory=list)
    policy: BatchPolicy | None = None

    def rate(self, begin: float, end: float) -> float:
        """Requests answered per second in an interval."""
        return sum(len(batch.requests) for at, batch in self.batches if begin < at <= end) / (end - begin)


async def serve_clients(
    policy: BatchPolicy,
    steps: Sequence[Step],
    inference_s: Callable[[int], float],
    horizon_s: float,
    shards_per_source: int = 1,
) -> Served:
    """Serve one client for each of `steps` for `horizon_s`; every `shards_per_source` of them share a process."""
    inbox, loop, served = Mailbox[InferenceRequest[None]]("rollout"), asyncio.get_running_loop(), Served(policy=policy)
    answers = [Mailbox[None](f"client {index}") for index in range(len(steps))]
    sources = [asyncio.Lock() for _ in range(-(-len(steps) // shards_per_source))]
    batcher = DynamicBatcher(inbox, policy)

    async def client(index: int) -> None:
        source, worked = index // shards_per_source, None
        while True:
            await inbox.send(InferenceRequest(None, 1, str(index), str(source), loop.time(), worked))
            await answers[index].receive()
            async with sources[source]:
                worked = steps[index]()
                await asyncio.sleep(worked)

    async def server() -> None:
        while True:
            batch = await batcher.next_batch()
            took = inference_s(len(batch.requests))
            await asyncio.sleep(took)
            served.batches.append((loop.time(), batch))
            for request in batch.requests:
                await answers[int(request.client)].send(None)
            batcher.observe(batch, took)

    tasks = [asyncio.create_task(client(index)) for index in range(len(steps))] + [asyncio.create_task(server())]
    done, _ = await asyncio.wait(tasks, timeout=horizon_s, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await batcher.close()
    for task in done:
        task.result()
    return served
