# SPDX-License-Identifier: Apache-2.0
"""The endless stream of optimizer steps, cut from one stream of bins that does not know ranks or workers.

An epoch's order is packed into bins; no bin holds samples of two epochs, but a step may take the last bins of one and
the first of the next. The position is a number of bins, so that a run is taken up anywhere, with any number of ranks.
Each rank gets the same number of a step's bins and as nearly as possible the same cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from embodix.contracts import BatchComposer
from embodix.packing.bins import Bins
from embodix.packing.sample_cost import CostModel, FloatArray, IntArray, SampleSizes


class EpochOrder(Protocol):
    """What a stream needs of ``embodix.data.order.SampleOrder``."""

    num_draws: int

    def epoch(self, epoch: int) -> IntArray: ...


@dataclass(frozen=True)
class StreamPosition:
    """Where the next step begins.

    Attributes:
        epoch: the epoch of the next bin.
        bin_in_epoch: bins of that epoch handed out before.
        num_bins, num_samples: handed out since the start of training.
    """

    epoch: int = 0
    bin_in_epoch: int = 0
    num_bins: int = 0
    num_samples: int = 0


@dataclass(frozen=True)
class ScheduledCost:
    """A cost model and when it takes effect.

    Attributes:
        first_bin: bins of the stream from here on are shared among ranks by it.
        first_epoch: epochs from here on are packed by it.
    """

    model: CostModel
    first_bin: int = 0
    first_epoch: int = 0


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step.

    Attributes:
        ranks: the bins of each rank, each an int64 array of dataset indices.
        costs: their costs by the model in force.
        end: where the next step begins.
    """

    ranks: list[list[IntArray]]
    costs: list[list[float]]
    end: StreamPosition

    @property
    def num_samples(self) -> int:
        """Samples of all ranks."""
        return sum(samples.size for bins in self.ranks for samples in bins)

    @property
    def imbalance(self) -> float:
        """Largest over mean cost of a rank; 1 is balanced."""
        loads = [sum(costs) for costs in self.costs]
        return max(loads) * len(loads) / sum(loads)


class BatchStream:
    """Steps without end, deterministic from its arguments and its position.

    Args:
        order: the samples of each epoch.
        composer: packs an epoch into bins.
        sizes: of every sample of the data set.
        num_ranks: processes that share a step.
        samples_per_step: samples that a rank's step should hold on average where no budget is set.
        cost: the first cost model.

    Raises:
        ValueError: a sample that no bin can hold, or an order that draws samples without a size.
    """

    def __init__(
        self,
        order: EpochOrder,
        composer: BatchComposer,
        sizes: SampleSizes,
        *,
        num_ranks: int,
        samples_per_step: float,
        cost: CostModel | None = None,
    ) -> None:
        self.position = StreamPosition()
        self._order, self._composer, self._sizes = order, composer, sizes
        self._num_ranks = num_ranks
        self._samples_per_bin = samples_per_step / composer.bins_per_step
        self._schedule = [ScheduledCost((cost or CostModel()).in_tokens(sizes))]
        self._packed: tuple[int, Bins] | None = None
        self._costs: tuple[CostModel, FloatArray] | None = None
        self._epoch_bins(0)  # a sample that fits no bin is refused before training

    @property
    def cost_models(self) -> list[ScheduledCost]:
        """The cost models so far, in the order in which they took or will take effect."""
        return list(self._schedule)

    def adopt(self, model: CostModel) -> None:
        """Share bins among ranks by ``model`` from the next step on, and pack by it from the next epoch on.

        What a step of the current epoch holds does not change.
        """
        scaled = model.in_tokens(self._sizes)
        self._schedule.append(ScheduledCost(scaled, self.position.num_bins, self.position.epoch + 1))

    def __iter__(self) -> Iterator[OptimizerStep]:
        return self

    def __next__(self) -> OptimizerStep:
        start = self.position
        bins, position = [], start
        for _ in range(self._num_ranks * self._composer.bins_per_step):
            samples, position = self._take(position)
            bins.append(samples)
        model = [entry.model for entry in self._schedule if entry.first_bin <= start.num_bins][-1]
        costs_N = self._costs_of(model)
        costs = [float(costs_N[samples].sum()) for samples in bins]
        ranks = assign_to_ranks(costs, self._num_ranks)
        self.position = position
        return OptimizerStep(
            ranks=[[bins[index] for index in indices] for indices in ranks],
            costs=[[costs[index] for index in indices] for indices in ranks],
            end=position,
        )

    def describe(self) -> dict[str, float]:
        """The bins of the epoch at hand in figures, for reports."""
        bins = self._epoch_bins(self.position.epoch)
        tokens = bins.sums(self._sizes.tokens.astype(np.float64))
        return {
            "bins_an_epoch": len(bins),
            "samples_a_bin": float(bins.num_samples.mean()),
            "tokens_a_bin": float(tokens.mean()),
            "tokens_of_the_largest_bin": float(tokens.max()),
        }

    def state_dict(self, position: StreamPosition | None = None) -> dict[str, Any]:
        """Position and cost models, as JSON holds them; ``position`` is another than the stream's own."""
        return {
            "position": asdict(position or self.position),
            "num_draws": self._order.num_draws,
            "cost_models": [asdict(entry) for entry in self._schedule],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position, with this stream's own number of ranks.

        Raises:
            ValueError: the position is one in another order.
        """
        if state["num_draws"] != self._order.num_draws:
            raise ValueError(
                f"The checkpoint's position is one in epochs of {state['num_draws']} samples; this run's have "
                f"{self._order.num_draws}. Resume with the data set (episodes, mixture) that it was trained on."
            )
        self.position = StreamPosition(**state["position"])
        self._schedule = [
            ScheduledCost(**{**entry, "model": CostModel(**entry["model"])}) for entry in state["cost_models"]
        ]
        self._packed = None

    def _take(self, position: StreamPosition) -> tuple[IntArray, StreamPosition]:
        bins = self._epoch_bins(position.epoch)
        if position.bin_in_epoch >= len(bins):
            raise ValueError(
                f"The checkpoint stands at bin {position.bin_in_epoch} of an epoch that is packed into {len(bins)} "
                "bins here. Resume with the packing options and train.batch_size that it was trained with."
            )
        samples = bins[position.bin_in_epoch]
        after = replace(
            position,
            bin_in_epoch=position.bin_in_epoch + 1,
            num_bins=position.num_bins + 1,
            num_samples=position.num_samples + samples.size,
        )
        if after.bin_in_epoch == len(bins):
            after = replace(after, epoch=position.epoch + 1, bin_in_epoch=0)
        return samples, after

    def _epoch_bins(self, epoch: int) -> Bins:
        if self._packed is None or self._packed[0] != epoch:
            samples_N = np.asarray(self._order.epoch(epoch), dtype=np.int64)
            if samples_N.max() >= len(self._sizes):
                raise ValueError(f"The order draws sample {samples_N.max()}; sizes are known of {len(self._sizes)}.")
            model = [entry.model for entry in self._schedule if entry.first_epoch <= epoch][-1]
            bins = self._composer.compose(samples_N, self._sizes, self._samples_per_bin, model)
            self._packed = (epoch, bins)
        return self._packed[1]

    def _costs_of(self, model: CostModel) -> FloatArray:
        if self._costs is None or self._costs[0] != model:
            self._costs = (model, model.costs(self._sizes))
        return self._costs[1]


def assign_to_ranks(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Indices of the bins of each rank, in the order of the bins.

    The dearest bin goes to the rank with the least so far that still has room (longest processing time first).

    Raises:
        ValueError: a number of bins that the ranks cannot share equally.
    """
    if num_ranks < 1 or len(costs) % num_ranks:
        raise ValueError(f"{len(costs)} bins cannot be shared equally by {num_ranks} ranks.")
    per_rank = len(costs) // num_ranks
    if per_rank == 1:
        return [[index] for index in range(num_ranks)]
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    load = np.zeros(num_ranks)
    for index in np.argsort(-np.asarray(costs), kind="stable"):
        rank = int(load.argmin())
        ranks[rank].append(int(index))
        load[rank] += costs[index]
        if len(ranks[rank]) == per_rank:
            load[rank] = np.inf
    return [sorted(bins) for bins in ranks]


class FixedCountComposer:
    """The same number of samples in every bin, the last of an epoch excepted."""

    def __init__(self, bins_per_step: int = 1) -> None:
        self.bins_per_step = require_bins_per_step(bins_per_step)

    def compose(self, samples_N: IntArray, sizes: SampleSizes, samples_per_bin: float, cost: CostModel) -> Bins:
        """Consecutive samples, ``samples_per_bin`` rounded to a whole number at a time."""
        count = max(1, round(samples_per_bin))
        ends_K = np.append(np.arange(count, samples_N.size, count), samples_N.size).astype(np.int64)
        return Bins(samples_N, ends_K)


def require_bins_per_step(bins_per_step: int) -> int:
    """The number itself.

    Raises:
        ValueError: below one.
    """
    if bins_per_step < 1:
        raise ValueError(f"A step takes one bin a rank at least; got packing.options.bins_per_step={bins_per_step}.")
    return bins_per_step
