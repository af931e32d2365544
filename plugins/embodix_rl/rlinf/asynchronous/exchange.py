# SPDX-License-Identifier: Apache-2.0
"""RLinf's channels as the scheduling core wants them, and what travels on them: messages, and weights in parts.

A channel of RLinf holds a queue for each key, so one channel for each receiving group is enough: requests, weights and
answers differ by key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embodix_rl.scheduling.staleness import Ticket
from embodix_rl.scheduling.weights import Part

REQUESTS, TAKEN, EVENTS = "requests", "taken", "events"
EVALUATION_REQUESTS = "evaluation requests"  # never computed together with those that are trained on
MOST_WAITS = 256  # RLinf keeps a thread for each receive that is waited for


def tickets_key(shard: str) -> str:
    """Of a shard's leave to generate, in the channel to environment workers."""
    return f"tickets {shard}"


def answers_key(shard: str) -> str:
    """Of a shard's actions, in the channel to environment workers."""
    return f"answers {shard}"


def samples_key(shard: str) -> str:
    """Of a shard's trajectories, in the channel to the trainer; it sends them in the order of its tickets."""
    return f"samples {shard}"


def weights_key(rank: int) -> str:
    """Of the weights for a rollout worker, in the channel to rollout workers."""
    return f"weights {rank}"


@dataclass(frozen=True)
class Asks:
    """`shard` wants to generate."""

    shard: str


@dataclass(frozen=True)
class Delivered:
    """What was generated under `ticket` is on its way to the trainer.

    Attributes:
        metrics: of the episodes that ended, by name.
        valid: False for a trajectory that was lost; what is on its way is `Masked`.
    """

    ticket: Ticket
    metrics: dict[str, list[float]]
    valid: bool = True


@dataclass(frozen=True)
class Adopted:
    """`worker` generates with `version` from now on."""

    worker: str
    version: int


@dataclass(frozen=True)
class SimulatorsLost:
    """`worker` is about to start its simulators again, because of `reason`."""

    worker: str
    reason: str


Event = Asks | Delivered | Adopted | SimulatorsLost


@dataclass(frozen=True)
class Masked:
    """In place of a trajectory that was lost with its simulators."""


class ChannelReceive[T]:
    """The receiving end of one key of an RLinf channel."""

    def __init__(self, channel: Any, key: str) -> None:
        self._channel, self._key = channel, key

    async def receive(self) -> T:
        """The next item; waits for it."""
        message = await self._channel.get(key=self._key, async_op=True).async_wait()
        item: T = message["item"]
        return item


class ChannelSend[T]:
    """The sending end of one key of an RLinf channel."""

    def __init__(self, channel: Any, key: str) -> None:
        self._channel, self._key = channel, key

    async def send(self, item: T) -> None:
        """Hand over an item; returns when the channel has it."""
        # In a dict whatever it is travels as a whole: RLinf takes dataclasses with tensors apart.
        await self._channel.put({"item": item}, key=self._key, async_op=True).async_wait()


def allow_many_waits() -> None:
    """Give the running loop enough threads: RLinf waits for messages in the loop's executor, which has few."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MOST_WAITS, thread_name_prefix="wait"))


Weights = dict[str, Tensor]


def split_weights(weights: Mapping[str, Tensor], part_bytes: int) -> list[Weights]:
    """Copies of the weights in CPU memory, in parts of about `part_bytes`, in their order; none is divided."""
    parts: list[Weights] = [{}]
    size = 0
    for name, weight in weights.items():
        copied = weight.detach().to("cpu", copy=True)
        if parts[-1] and size + copied.nbytes > part_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = copied
        size += copied.nbytes
    return parts


class ModelBuffer:
    """One of a rollout worker's two models (`embodix_rl.scheduling.weights.Buffer`)."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._weights: dict[str, Any] = model.state_dict()
        self._tell_changed = getattr(model, "weights_changed", None)  # of a model that computes with a copy of them

    @property
    def names(self) -> list[str]:
        """Of the weights, in their order."""
        return list(self._weights)

    @torch.no_grad()
    def write(self, part: Part) -> None:
        """Copy a part into the model.

        Raises:
            KeyError: a weight that the model has not.
        """
        for name, weight in part.payload.items():
            self._weights[name].copy_(weight)
        if self._tell_changed is not None:
            self._tell_changed()
