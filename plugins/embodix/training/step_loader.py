# SPDX-License-Identifier: Apache-2.0
"""The loader of a run whose packer composes the batches: one item is one optimizer step of this rank.

Steps come from a ``BatchStream``, which every rank runs alike. Workers read ahead of the loop, so the position that a
checkpoint keeps is that of the last step that the loop took.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, Dataset

from embodix.data.preprocessing import MicroBatches
from embodix.packing.batches import BatchStream, Step

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
        self.step: Step | None = None
        self._stream, self._steps, self._rank = stream, steps, rank
        self._device, self._options = device, options
        self._before_step, self._after_step = before_step, after_step
        self._planned: deque[Step] = deque()

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
