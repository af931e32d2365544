# SPDX-License-Identifier: Apache-2.0
"""The global batch as micro-batches: each is worked on as soon as it may be, then one optimizer step.

What may start when. Of a sample whose trajectory is complete, these need nothing of other samples: moving it to the
device, its advantages and returns before normalisation, proximal log-probabilities, the value loss and the entropy.
That is the work `prepare`, and it starts as soon as a micro-batch is full. The policy loss needs the normalised
advantage; with clipping it is no linear function of the advantage's shift, so its backward pass can't run on the raw
one and be put right later. That is the work `train`:

- ``none``, and ``group`` for GRPO (an advantage is relative to its own group, which comes whole): at once.
- ``previous``: at once, with the mean and deviation of the global batch before. All micro-batches of a batch share
  them, so the gradient does not depend on the order of arrival; the first batch of a run waits as ``exact`` does. A
  change of the algorithm, by the name of the choice.
- ``exact``: when the last sample of the global batch is there. What streams is `prepare`; the gradient is that of the
  whole batch at once.

Gradients are sums over valid elements divided by those of the whole batch. Where `train` runs before their number is
known, the step itself divides the accumulated gradient (`Step.num_valid`), which is the same number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from embodix_rl.scheduling.normalization import Moments, Scale

Normalization = Literal["none", "group", "previous", "exact"]
NORMALIZATIONS: tuple[Normalization, ...] = ("none", "group", "previous", "exact")


@dataclass(frozen=True)
class Sample:
    """What streams: one trajectory, or one shard of them.

    Attributes:
        payload: the trainer's.
        size: trajectories in it.
        advantages: the moments of its valid advantages; a masked sample has none.
        group: GRPO's group; samples of a group stay in one micro-batch. None for a group of its own.
    """

    payload: Any
    size: int = 1
    advantages: Moments = field(default_factory=Moments)
    group: str | None = None


@dataclass(frozen=True)
class Prepare:
    """Work that needs only the micro-batch's own samples."""

    index: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Train:
    """Forward and backward of the loss; gradients accumulate.

    Attributes:
        index: of the micro-batch in its global batch.
        samples: its samples.
        scale: normalises their advantages.
    """

    index: int
    samples: tuple[Sample, ...]
    scale: Scale


@dataclass(frozen=True)
class Step:
    """One optimizer step; the last work of a global batch.

    Attributes:
        num_micro_batches: that it has.
        num_valid: valid advantages of the global batch; what gradients are divided by.
    """

    num_micro_batches: int
    num_valid: float


Work = Prepare | Train | Step


class MicroBatchStreamer:
    """Turns the arriving samples of global batches into work, in an order that only depends on their arrival.

    Args:
        batch_size: trajectories of a global batch.
        micro_batch_size: trajectories of a micro-batch.
        group_size: trajectories of a group; 1 without groups.
        normalization: of advantages, see the module.

    Raises:
        ValueError: sizes that do not divide each other, or ``group`` without groups.
    """

    def __init__(
        self, batch_size: int, micro_batch_size: int, group_size: int = 1, normalization: Normalization = "exact"
    ) -> None:
        for name, larger, smaller in [
            ("batch_size", batch_size, micro_batch_size),
            ("micro_batch_size", micro_batch_size, group_size),
        ]:
            if smaller < 1 or larger < smaller or larger % smaller:
                nearest = max(round(larger / max(smaller, 1)), 1) * max(smaller, 1)
                raise ValueError(f"`{name}` must be a multiple of {smaller}, got {larger}; the nearest is {nearest}.")
        if normalization not in NORMALIZATIONS:
            raise ValueError(f"`normalization` must be one of {NORMALIZATIONS}, got {normalization!r}.")
        if normalization == "group" and group_size < 2:
            raise ValueError("`normalization=group` compares trajectories of a group: `group_size` must be above 1.")
        self._batch_size, self._micro_batch_size, self._group_size = batch_size, micro_batch_size, group_size
        self._normalization = normalization
        self._previous: Scale | None = None
        self._begin()

    @property
    def missing(self) -> int:
        """Trajectories that the global batch still lacks."""
        return self._batch_size - self._num_arrived

    def add(self, sample: Sample) -> list[Work]:
        """The work that `sample` sets free, in the order to do it.

        Raises:
            ValueError: more trajectories than the batch or the group has, or a sample that splits micro-batches.
        """
        if sample.size > self.missing:
            raise ValueError(f"The global batch lacks {self.missing} trajectories, got {sample.size} more.")
        self._num_arrived += sample.size
        self._moments += sample.advantages
        work: list[Work] = []
        self._filling += self._complete_group(sample)
        while sum(one.size for one in self._filling) >= self._micro_batch_size:
            work += self._micro_batch()
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
        self._num_arrived, self._num_micro_batches = 0, 0
        self._moments = Moments()
        self._groups: dict[str, list[Sample]] = {}
        self._filling: list[Sample] = []
        self._waiting: list[Prepare] = []

    def _complete_group(self, sample: Sample) -> list[Sample]:
        """The samples of a group when it is whole."""
        if sample.group is None:
            if sample.size % self._group_size:
                raise ValueError(
                    f"A sample has whole groups of {self._group_size} or names its own; got {sample.size}."
                )
            return [sample]
        members = self._groups.setdefault(sample.group, [])
        members.append(sample)
        size = sum(member.size for member in members)
        if size > self._group_size:
            raise ValueError(f"Group {sample.group!r} has {size} trajectories, `group_size` is {self._group_size}.")
        return self._groups.pop(sample.group) if size == self._group_size else []

    def _micro_batch(self) -> list[Work]:
        """Cut one micro-batch off what is filled."""
        taken: list[Sample] = []
        while sum(sample.size for sample in taken) < self._micro_batch_size:
            taken.append(self._filling.pop(0))
        size = sum(sample.size for sample in taken)
        if size > self._micro_batch_size:
            raise ValueError(
                f"Samples of {[sample.size for sample in taken]} trajectories do not fill a micro-batch of "
                f"{self._micro_batch_size}; make `micro_batch_size` a multiple of a sample's trajectories."
            )
        prepare = Prepare(self._num_micro_batches, tuple(taken))
        self._num_micro_batches += 1
        scale = self._scale_at_once()
        if scale is not None:
            return [prepare, Train(prepare.index, prepare.samples, scale)]
        self._waiting.append(prepare)
        return [prepare]

    def _scale_at_once(self) -> Scale | None:
        if self._normalization in ("none", "group"):
            return Scale()
        return self._previous if self._normalization == "previous" else None

    def _end(self) -> list[Work]:
        if self._groups:
            raise ValueError(
                f"Groups {sorted(self._groups)} are incomplete at the end of their global batch; admit a group as one "
                "ticket (`admission_size`), so that it is trained in one batch."
            )
        assert not self._filling
        scale = self._moments.scale()
        work: list[Work] = [Train(prepare.index, prepare.samples, scale) for prepare in self._waiting]
        work.append(Step(self._num_micro_batches, self._moments.count))
        if self._normalization == "previous" and self._moments.count:  # a batch that is masked has no scale
            self._previous = scale
        self._begin()
        return work
