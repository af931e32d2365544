# SPDX-License-Identifier: Apache-2.0
"""A torch sampler that follows a sample order, an epoch of it an iteration."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

from embodix.data.order import SampleOrder


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
