# SPDX-License-Identifier: Apache-2.0
"""The global batch as micro-batches: each is worked on as soon as it may be, then one optimizer step.

What may start when. Of a sample whose trajectory is complete, these need nothing of other samples: moving it to the
device, its advantages and returns before normalisation, proximal log-probabilities, the value loss and the entropy.
That is the work `prepare`, and it starts as soon as a micro-batch is full. The policy loss needs the normalised
advantage; with clipping it is no linear function of the advantage's shift, so its backward pass can't run on the raw
one and be put right later. That is the work `train`:

- ``none``, as for GRPO (an advantage is relative to its own group, which comes whole in one sample): at once.
- ``previous``: at once, with the mean and deviation of the global batch before. All micro-batches of a batch share
  them, so the gradient does not depend on the order of arrival; the first batch of a run waits as ``exact`` does. A
  change of the algorithm, by the name of the choice.
- ``exact``: when the last sample of the global batch is there. What streams is `prepare`; the gradient is that of the
  whole batch at once.

Gradients are sums over valid elements divided by those of the whole batch; their number may not be known before the
step, which divides the accumulated gradient.

Mean and deviation are those of parts that arrive in any order, merged by the parallel form of Welford's algorithm
(Chan, Golub and LeVeque 1979), which loses no digits where the mean is large beside the deviation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Normalization = Literal["none", "previous", "exact"]
NORMALIZATIONS: tuple[Normalization, ...] = ("none", "previous", "exact")


@dataclass(frozen=True)
class AdvantageMoments:
    """Count, mean and sum of squared differences from the mean, of valid advantages."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(values: Iterable[float]) -> AdvantageMoments:
        """The moments of plain numbers."""
        numbers = list(values)
        if not numbers:
            return AdvantageMoments()
        mean = math.fsum(numbers) / len(numbers)
        return AdvantageMoments(len(numbers), mean, math.fsum((number - mean) ** 2 for number in numbers))

    def __add__(self, other: AdvantageMoments) -> AdvantageMoments:
        """The moments of both together."""
        count = self.count + other.count
        if not self.count or not other.count:
            return self if self.count else other
        apart = other.mean - self.mean
        share = other.count / count
        return AdvantageMoments(
            count, self.mean + apart * share, self.squares + other.squares + apart * apart * self.count * share
        )

    def scale(self, epsilon: float = 1e-5) -> Scale:
        """What normalises to mean 0 and deviation 1, with the unbiased deviation that `torch.std` has."""
        deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return Scale(self.mean, deviation + epsilon)


@dataclass(frozen=True)
class Scale:
    """Normalises an advantage: ``(advantage - mean) / deviation``."""

    mean: float = 0.0
    deviation: float = 1.0

    def __call__(self, advantage: float) -> float:
        return (advantage - self.mean) / self.deviation


@dataclass(frozen=True)
class StreamedSample:
    """What streams: the trajectory of one shard.

    Attributes:
        payload: the trainer's.
        advantages: the moments of its valid advantages; a masked sample has none.
    """

    payload: Any
    advantages: AdvantageMoments = field(default_factory=AdvantageMoments)


@dataclass(frozen=True)
class Prepare:
    """Work that needs only the micro-batch's own samples."""

    index: int
    samples: tuple[StreamedSample, ...]


@dataclass(frozen=True)
class Train:
    """Forward and backward of the loss; gradients accumulate.

    Attributes:
        index: of the micro-batch in its global batch.
        samples: its samples.
        scale: normalises their advantages.
    """

    index: int
    samples: tuple[StreamedSample, ...]
    scale: Scale


@dataclass(frozen=True)
class OptimizerStepDue:
    """The last work of a global batch."""


Work = Prepare | Train | OptimizerStepDue


class MicroBatchStreamer:
    """Turns the arriving samples of global batches into work, in an order that only depends on their arrival.

    Args:
        batch_size: samples of a global batch.
        micro_batch_size: samples of a micro-batch.
        normalization: of advantages, see the module.

    Raises:
        ValueError: sizes that do not divide each other, or an unknown normalization.
    """

    def __init__(self, batch_size: int, micro_batch_size: int, normalization: Normalization = "exact") -> None:
        if micro_batch_size < 1 or batch_size < micro_batch_size or batch_size % micro_batch_size:
            unit = max(micro_batch_size, 1)
            nearest = max(round(batch_size / unit), 1) * unit
            raise ValueError(
                f"`batch_size` must be a multiple of {micro_batch_size}, got {batch_size}; the nearest is {nearest}."
            )
        if normalization not in NORMALIZATIONS:
            raise ValueError(f"`normalization` must be one of {NORMALIZATIONS}, got {normalization!r}.")
        self._batch_size, self._micro_batch_size = batch_size, micro_batch_size
        self._normalization = normalization
        self._previous: Scale | None = None
        self._begin()

    @property
    def missing(self) -> int:
        """Samples that the global batch still lacks."""
        return self._batch_size - self._num_arrived

    def add(self, sample: StreamedSample) -> list[Work]:
        """The work that `sample` sets free, in the order to do it."""
        self._num_arrived += 1
        self._moments += sample.advantages
        self._filling.append(sample)
        work = self._micro_batch() if len(self._filling) == self._micro_batch_size else []
        if not self.missing:
            work += self._end()
        return work

    def state(self) -> dict[str, Any]:
        """What a checkpoint between two global batches keeps."""
        return {"previous": None if self._previous is None else (self._previous.mean, self._previous.deviation)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self._previous = None if state["previous"] is None else Scale(*state["previous"])

    def _begin(self) -> None:
        self._num_arrived = 0
        self._moments = AdvantageMoments()
        self._filling: list[StreamedSample] = []
        self._waiting: list[Prepare] = []

    def _micro_batch(self) -> list[Work]:
        """What is filled is a micro-batch."""
        prepare = Prepare((self._num_arrived - 1) // self._micro_batch_size, tuple(self._filling))
        self._filling = []
        scale = self._scale_at_once()
        if scale is not None:
            return [prepare, Train(prepare.index, prepare.samples, scale)]
        self._waiting.append(prepare)
        return [prepare]

    def _scale_at_once(self) -> Scale | None:
        if self._normalization == "none":
            return Scale()
        return self._previous if self._normalization == "previous" else None

    def _end(self) -> list[Work]:
        scale = self._moments.scale()
        work: list[Work] = [Train(prepare.index, prepare.samples, scale) for prepare in self._waiting]
        work.append(OptimizerStepDue())
        if self._normalization == "previous" and self._moments.count:  # a batch that is masked has no scale
            self._previous = scale
        self._begin()
        return work
