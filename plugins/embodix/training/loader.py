# SPDX-License-Identifier: Apache-2.0
"""A training loader that remembers its position and can continue from it to the bit.

Upstream resumes weights, optimizer, schedule and random state, but starts the epoch's shuffle over: the samples of
a resumed run differ from those of an uninterrupted one. Here the random state at the start of the epoch and the
number of batches handed out are kept; on resume the same shuffle is drawn again, the batches already seen are
skipped without loading them, and the random state of the checkpoint is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import skip_first_batches
from lerobot.utils.random_utils import deserialize_rng_state, serialize_rng_state
from safetensors import safe_open
from safetensors.torch import save_file

from embodix.training.order_sampler import OrderSampler

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
    """

    def __init__(
        self,
        loader: Any,
        resume_from: LoaderState | None,
        before_batch: Callable[[], None],
        after_batch: Callable[[Any], None],
        order: OrderSampler | None = None,
    ) -> None:
        self.loader = loader
        self._resume_from = resume_from
        self._before_batch = before_batch
        self._after_batch = after_batch
        self._order = order
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
