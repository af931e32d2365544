# SPDX-License-Identifier: Apache-2.0
"""Training loaders that remember their position and can continue from it to the bit.

``ResumableLoader`` goes round upstream's. Upstream resumes weights, optimizer, schedule and random state, but starts
the epoch's shuffle over: the samples of a resumed run differ from those of an uninterrupted one. Here the random state
at the start of the epoch and the number of batches handed out are kept; on resume the same shuffle is drawn again, the
batches already seen are skipped without loading them, and the random state of the checkpoint is put back.

``StepLoader`` is that of a run whose packer composes the batches: one item is one optimizer step of this rank. Steps
come from a ``BatchStream``, which every rank runs alike. Workers read ahead of the loop, so the position that a
checkpoint keeps is that of the last step that the loop took.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import skip_first_batches
from accelerate.utils import send_to_device
from lerobot.utils.random_utils import deserialize_rng_state, serialize_rng_state
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Dataset, Sampler

from embodix.data.order import SampleOrder
from embodix.data.preprocessing import MicroBatches
from embodix.packing.batches import BatchStream, OptimizerStep

LOADER_STATE = "embodix_loader.safetensors"
_NUM_BATCHES, _ORDER_EPOCH, _SAMPLER = "num_batches", "order_epoch", "sampler_generator"


@dataclass(frozen=True)
class LoaderState:
    """Position in an epoch.

    Attributes:
        epoch_start: random state of python, numpy and torch when the epoch's shuffle was drawn.
        num_batches: batches handed out since.
        sampler_generator: state of the sampler's own generator at the epoch's start (several processes only).
        order_epoch: the epoch of an order that is embodix's own; 0 for upstream's shuffle.
    """

    epoch_start: dict[str, torch.Tensor]
    num_batches: int
    sampler_generator: torch.Tensor | None = None
    order_epoch: int = 0

    def save(self, folder: Path) -> None:
        counts = {_NUM_BATCHES: torch.tensor([self.num_batches]), _ORDER_EPOCH: torch.tensor([self.order_epoch])}
        tensors = {**self.epoch_start, **counts}
        if self.sampler_generator is not None:
            tensors[_SAMPLER] = self.sampler_generator
        save_file(tensors, folder / LOADER_STATE)

    @classmethod
    def load(cls, folder: Path) -> LoaderState | None:
        """The state saved in a checkpoint's ``training_state`` folder, or None for a checkpoint without one."""
        path = folder / LOADER_STATE
        if not path.is_file():
            return None
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  not a mapping
        num_batches = int(tensors.pop(_NUM_BATCHES).item())
        order_epoch = int(tensors.pop(_ORDER_EPOCH, torch.zeros(1)).item())
        generator = tensors.pop(_SAMPLER, None)
        return cls(tensors, num_batches, generator, order_epoch)


class ResumableLoader:
    """Iterates a prepared loader an epoch at a time, as upstream's ``cycle`` asks, and knows its position.

    Args:
        loader: the loader that ``Accelerator.prepare`` returned.
        resume_from: position to continue from, used by the first epoch only.
        before_batch, after_batch: called around the wait for each batch.
        order: the sampler of an order that is embodix's own, None for upstream's shuffle.
        epoch_ended: called after the last batch of each epoch.
    """

    def __init__(
        self,
        loader: Any,
        resume_from: LoaderState | None,
        before_batch: Callable[[], None],
        after_batch: Callable[[Any], None],
        order: OrderSampler | None = None,
        epoch_ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.loader = loader
        self._resume_from = resume_from
        self._before_batch = before_batch
        self._after_batch = after_batch
        self._order = order
        self._epoch_ended = epoch_ended
        self._state: LoaderState | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    @property
    def position(self) -> LoaderState | None:
        """Where the run stands, or None before the first batch."""
        return self._state

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resume_from = self._resume_from, None
        batches = self._continued_epoch(resumed) if resumed else self._fresh_epoch()
        while True:
            self._before_batch()
            try:
                batch = next(batches)
            except StopIteration:
                self._epoch_ended()
                return
            assert self._state is not None
            self._state = replace(self._state, num_batches=self._state.num_batches + 1)
            self._after_batch(batch)
            yield batch

    def _fresh_epoch(self) -> Iterator[Any]:
        generator = self._sampler_generator()
        sampler_state = generator.get_state() if generator is not None else None
        order_epoch = self._order.epoch if self._order is not None else 0
        self._state = LoaderState(serialize_rng_state(), 0, sampler_state, order_epoch)
        yield from self.loader

    def _continued_epoch(self, state: LoaderState) -> Iterator[Any]:
        """Draw the interrupted epoch's shuffle again, skip what was seen, then restore the checkpoint's stream."""
        checkpoint_stream = serialize_rng_state()
        deserialize_rng_state(state.epoch_start)
        generator = self._sampler_generator()
        if generator is not None and state.sampler_generator is not None:
            generator.set_state(state.sampler_generator)
        if self._order is not None:
            self._order.epoch = state.order_epoch
        self._state = state
        batches = iter(skip_first_batches(self.loader, state.num_batches))
        first = next(batches, None)
        deserialize_rng_state(checkpoint_stream)
        if first is None:
            return
        yield first
        yield from batches

    def _sampler_generator(self) -> torch.Generator | None:
        generator = getattr(self.loader, "synchronized_generator", None)
        return generator if isinstance(generator, torch.Generator) else None


STREAM_STATE = "embodix_stream.json"
PlannedStep = tuple[int, list[list[int]]]


@dataclass(frozen=True)
class StreamState:
    """What a checkpoint keeps of a composed run.

    Attributes:
        stream: the state of the ``BatchStream`` after the last step.
        samples_since_schedule: samples trained since the learning-rate schedule last advanced.
    """

    stream: dict[str, Any]
    samples_since_schedule: int = 0

    def save(self, folder: Path) -> None:
        fields = {"stream": self.stream, "samples_since_schedule": self.samples_since_schedule}
        (folder / STREAM_STATE).write_text(json.dumps(fields, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> StreamState | None:
        """The state saved in a checkpoint's ``training_state`` folder, or None for a checkpoint without one."""
        path = folder / STREAM_STATE
        return cls(**json.loads(path.read_text())) if path.is_file() else None


class StepDataset(Dataset[Any]):
    """Reads and collates the bins of a step; several become ``MicroBatches``.

    What is random in reading (image transforms) is seeded by the number of the step, so that it depends neither on the
    workers nor on where a run was resumed.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed

    def __getitem__(self, planned: PlannedStep) -> Any:
        number, bins = planned
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((self._seed << 32) + number)
            batches = [self._collate([self._dataset[index] for index in samples]) for samples in bins]
        return batches[0] if len(batches) == 1 else MicroBatches(batches)


class StepLoader:
    """Iterates over the steps of one rank without end.

    Args:
        stream: the steps; at the position to continue from.
        steps: reads a step.
        rank: whose bins are read.
        device: where batches are put, as accelerate does.
        options: of torch's ``DataLoader``: ``num_workers``, ``pin_memory``, ``prefetch_factor``.
        before_step, after_step: called around the wait for each step.

    Attributes:
        step: the step that the loop took last, None before the first.
    """

    def __init__(
        self,
        stream: BatchStream,
        steps: StepDataset,
        rank: int,
        device: torch.device,
        options: dict[str, Any],
        before_step: Callable[[], None],
        after_step: Callable[[Any], None],
    ) -> None:
        self.step: OptimizerStep | None = None
        self._stream, self._steps, self._rank = stream, steps, rank
        self._device, self._options = device, options
        self._before_step, self._after_step = before_step, after_step
        self._planned: deque[OptimizerStep] = deque()

    def stream_state(self) -> dict[str, Any] | None:
        """The stream's state after the last step, None before the first."""
        return self._stream.state_dict(self.step.end) if self.step is not None else None

    def __iter__(self) -> Iterator[Any]:
        # A generator of its own: the loader must not draw its workers' seed from the stream of the training loop.
        generator = torch.Generator()
        batches = iter(
            DataLoader(self._steps, batch_size=None, sampler=_Plan(self._plan), generator=generator, **self._options)
        )
        while True:
            self._before_step()
            batch = next(batches)
            self.step = self._planned.popleft()
            placed = send_to_device(batch, self._device, non_blocking=self._device.type == "cuda")
            self._after_step(placed)
            yield placed

    def _plan(self) -> Iterator[PlannedStep]:
        """Steps in their order, as the loader asks for them: by the workers' number ahead of the loop."""
        for step in self._stream:
            self._planned.append(step)
            yield step.end.num_bins, [samples.tolist() for samples in step.ranks[self._rank]]


class _Plan:
    """An endless sampler."""

    def __init__(self, plan: Callable[[], Iterator[PlannedStep]]) -> None:
        self._plan = plan

    def __iter__(self) -> Iterator[PlannedStep]:
        return self._plan()


class OrderSampler(Sampler[int]):
    """Yields the indices of one epoch of the order, then moves on to the next.

    The order is the same on every rank and in every worker, so that accelerate can cut its batches between ranks.

    Attributes:
        epoch: the epoch that the next iteration yields.
    """

    def __init__(self, order: SampleOrder) -> None:
        self.order = order
        self.epoch = 0

    def __len__(self) -> int:
        return self.order.num_draws

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        yield from self.order.epoch(epoch).tolist()
