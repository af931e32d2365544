# SPDX-License-Identifier: Apache-2.0
"""Several optimizer steps on a global batch, as RLinf's synchronous training makes them.

The proximal policy of the decoupled objective is the one at the beginning of the version. Its log-probabilities are
computed when a trajectory arrives, before the first step: of this update, that is what streams.

Shape suffixes: S chunk steps, B environments, N chunks (S times B).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from embodix_rl.objectives.objective import Sampled
from embodix_rl.rlinf.asynchronous.update import Evaluate, ShardSamples, StreamedUpdate
from embodix_rl.scheduling.normalization import Scale

OptimizerStep = Callable[[], Mapping[str, float]]


class VersionUpdate(Protocol):
    """What trains one policy version.

    Attributes:
        prepares: whether `prepare` does anything.
    """

    prepares: bool

    def prepare(self, samples: ShardSamples) -> None:
        """A trajectory has arrived."""

    def train(self, samples: ShardSamples, scale: Scale, version: int) -> None:
        """It may be trained on, by the policy of `version`, with advantages normalised by `scale`."""

    def finish(self) -> dict[str, float]:
        """All have; returns metrics."""


class OneStep:
    """One optimizer step a version; nothing waits for it but the step itself.

    Args:
        gradient: of the batch.
        parameters: that are trained.
        step: steps the optimizer, clears gradients and returns metrics.
    """

    prepares = False

    def __init__(self, gradient: StreamedUpdate, parameters: Callable[[], Any], step: OptimizerStep) -> None:
        self._gradient, self._parameters, self._step = gradient, parameters, step

    def prepare(self, samples: ShardSamples) -> None:
        """Nothing: the proximal log-probabilities are those of the training pass."""

    def train(self, samples: ShardSamples, scale: Scale, version: int) -> None:
        self._gradient.train(samples, scale, version)

    def finish(self) -> dict[str, float]:
        return {**self._gradient.finish(self._parameters()), **self._step()}


class MiniBatches:
    """Steps on mini-batches of the whole batch, in one order for all epochs and versions, as RLinf's.

    Args:
        gradient, parameters, step: as for `OneStep`.
        evaluate: the policy's ``logprobs`` of chunks.
        micro_batch: chunks of a forward pass.
        size: chunks of a mini-batch.
        epochs: times that each is trained on.
        seed: of the order.
    """

    prepares = True

    def __init__(
        self,
        gradient: StreamedUpdate,
        parameters: Callable[[], Any],
        step: OptimizerStep,
        evaluate: Evaluate,
        *,
        micro_batch: int,
        size: int,
        epochs: int,
        seed: int,
    ) -> None:
        self._one = OneStep(gradient, parameters, step)
        self._evaluate, self._micro_batch = evaluate, micro_batch
        self._size, self._epochs, self._seed = size, epochs, seed
        self._proximal: dict[int, Tensor] = {}  # by the identity of samples that wait
        self._held: list[ShardSamples] = []
        self._version = 0

    @torch.no_grad()
    def prepare(self, samples: ShardSamples) -> None:
        """Keep what the policy at the beginning of the version says of the chunks."""
        rows = torch.arange(samples.sampled.valid_B.numel()).split(self._micro_batch)
        parts = [self._evaluate({name: value[some] for name, value in samples.inputs.items()}) for some in rows]
        self._proximal[id(samples)] = torch.cat([_log_probs(part) for part in parts])

    def train(self, samples: ShardSamples, scale: Scale, version: int) -> None:
        advantages_N = (samples.sampled.advantages_B - scale.mean) / scale.deviation
        proximal = self._proximal.pop(id(samples))
        sampled = replace(samples.sampled, advantages_B=advantages_N, proximal_log_probs_BTA=proximal)
        self._held.append(replace(samples, sampled=sampled))
        self._version = version

    def finish(self) -> dict[str, float]:
        """All steps; metrics are means over them."""
        whole, self._held = joined(self._held), []
        values: dict[str, list[float]] = defaultdict(list)
        for _ in range(self._epochs):
            for rows_N in self._mini_batches(whole.sampled.valid_B.numel()):
                self._one.train(whole[rows_N], Scale(), self._version)
                for name, value in self._one.finish().items():
                    values[name].append(value)
        return {name: max(of) if name.endswith("_max") else sum(of) / len(of) for name, of in values.items()}

    def _mini_batches(self, num_chunks: int) -> Iterator[Tensor]:
        order_N = torch.randperm(num_chunks, generator=torch.Generator().manual_seed(self._seed))
        yield from order_N.split(self._size)


def joined(parts: list[ShardSamples]) -> ShardSamples:
    """All trajectories of a batch as one, in the order that RLinf gives them: by step, then by trajectory.

    Trajectories are ordered by which one of its shard each is, then by shard, however they arrived.
    """
    seen: Counter[str] = Counter()
    ordered = []
    for part in parts:
        ordered.append(((seen[part.shard], part.shard), part))
        seen[part.shard] += 1
    sorted_parts = [part for _, part in sorted(ordered, key=lambda item: item[0])]
    steps = parts[0].num_steps

    def join(tensors: list[Any]) -> Any:
        if tensors[0] is None:
            return None
        return torch.cat([tensor.unflatten(0, (steps, -1)) for tensor in tensors], dim=1).flatten(0, 1)

    inputs = {name: join([part.inputs[name] for part in sorted_parts]) for name in parts[0].inputs}
    names = [item.name for item in fields(Sampled)]
    columns = {name: join([getattr(part.sampled, name) for part in sorted_parts]) for name in names}
    return ShardSamples(inputs, Sampled(**columns), join([part.counted_N for part in sorted_parts]), num_steps=steps)


def _log_probs(outputs: Mapping[str, Tensor | None]) -> Tensor:
    log_probs = outputs["logprobs"]
    assert log_probs is not None
    return log_probs
