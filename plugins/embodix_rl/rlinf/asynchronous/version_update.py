# SPDX-License-Identifier: Apache-2.0
"""What trains one policy version: the gradient of samples that arrive one by one, and the optimizer's steps.

With one optimizer step a version, the policy that is trained is the proximal one of the decoupled objective until the
step: its log-probabilities are those that the forward pass of training gives, and nothing has to be recomputed. What
corrects for staleness is its weight over the policy that sampled. Losses are summed; the step divides gradients by the
chunks of the whole batch, which need not be known before.

With several steps, as RLinf's synchronous training makes them, the proximal policy is the one at the beginning of the
version. Its log-probabilities are computed when a trajectory arrives, before the first step: of such an update, that is
what streams.

Shape suffixes: S chunk steps, B environments, N chunks (S times B).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from embodix_rl.objectives.groups import GroupCount
from embodix_rl.objectives.objective import (
    Losses,
    ObjectiveSettings,
    SampledChunks,
    ValueLossSettings,
    chunk_losses,
)
from embodix_rl.objectives.policy_loss import PolicyLossSettings, RatioStatistics
from embodix_rl.scheduling.streamer import AdvantageMoments, Scale

LEVELS: dict[str, Any] = {"chunk_level": "chunk", "action_level": "action", "token_level": "element"}
Evaluate = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor | None]]
OptimizerStep = Callable[[], Mapping[str, float]]


def objective_of(algorithm: Mapping[str, Any], behaviour_cap: float | None) -> ObjectiveSettings:
    """The decoupled objective with the clips of RLinf's node ``algorithm``."""
    value = ValueLossSettings(clip=algorithm["value_clip"], huber_delta=algorithm["huber_delta"])
    return ObjectiveSettings(
        level=LEVELS[algorithm["logprob_type"]],
        policy=PolicyLossSettings(
            clip_low=algorithm["clip_ratio_low"],
            clip_high=algorithm["clip_ratio_high"],
            dual_clip=algorithm["clip_ratio_c"],
            behaviour_cap=behaviour_cap,
        ),
        value=value if algorithm["adv_type"] == "gae" else None,
        entropy_weight=algorithm["entropy_bonus"],
    )


@dataclass(frozen=True)
class ShardSamples:
    """The chunks of one trajectory.

    Attributes:
        inputs: what the policy recomputes them from, ``[N, ...]``.
        sampled: with advantages that are not normalised.
        counted_N: bool, the chunks that the mean of the losses is over; None for the valid ones.
        shard: that generated it.
        num_steps: chunk steps; the chunks are ordered by step, then environment. 0 where no order is asked for.
        groups: that GRPO compared.
    """

    inputs: Mapping[str, Tensor]
    sampled: SampledChunks
    counted_N: Tensor | None = None
    shard: str = ""
    num_steps: int = 0
    groups: GroupCount = field(default_factory=GroupCount)

    def __getitem__(self, rows_N: Tensor) -> ShardSamples:
        """Some of the chunks, without their order."""
        inputs = {name: value[rows_N] for name, value in self.inputs.items()}
        counted_N = None if self.counted_N is None else self.counted_N[rows_N]
        return ShardSamples(inputs, self.sampled[rows_N], counted_N, self.shard)

    @property
    def num_counted(self) -> float:
        """What the sum of the losses is divided by."""
        return float((self.sampled.valid_B if self.counted_N is None else self.counted_N).sum())

    @property
    def moments(self) -> AdvantageMoments:
        """Of the valid advantages."""
        valid = self.sampled.advantages_B[self.sampled.valid_B].double()
        if not valid.numel():
            return AdvantageMoments()
        mean = valid.mean()
        return AdvantageMoments(float(valid.numel()), float(mean), float((valid - mean).square().sum()))


class StreamedUpdate:
    """Accumulates the gradient of one global batch after the other.

    Args:
        evaluate: the policy's ``logprobs`` ``[N, T, A]``, ``entropy`` (its mean counts) and ``values`` of chunks, with
            gradients.
        objective: that is optimised, decoupled.
        micro_batch: chunks of a forward and backward pass.
        backward_context: in which a micro-batch is computed.
    """

    def __init__(
        self,
        evaluate: Evaluate,
        objective: ObjectiveSettings,
        micro_batch: int,
        backward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._evaluate, self._objective, self._micro_batch = evaluate, objective, micro_batch
        self.value_only = False  # the value head is warmed up: nothing else has a gradient
        self._context = backward_context
        self._ratios = RatioStatistics()
        self._policy = self._value = self._entropy = self._num_counted = 0.0

    def train(self, samples: ShardSamples, scale: Scale) -> None:
        """Add the gradient of a trajectory's chunks, their advantages normalised by `scale`."""
        normalised = (samples.sampled.advantages_B - scale.mean) / scale.deviation
        if self.value_only:
            normalised = torch.zeros_like(normalised)
        sampled = replace(samples.sampled, advantages_B=normalised)
        self._num_counted += samples.num_counted
        for rows_N in torch.arange(normalised.numel()).split(self._micro_batch):
            inputs = {name: value[rows_N] for name, value in samples.inputs.items()}
            with self._context():
                losses = self._losses(inputs, sampled[rows_N])
                losses.total.backward()
            self._ratios += losses.ratios
            self._policy, self._value = self._policy + losses.policy, self._value + losses.value
            self._entropy += losses.entropy

    def finish(self, parameters: Iterable[Tensor]) -> dict[str, float]:
        """Divide the gradients by the chunks that were counted, which makes them those of the batch's mean.

        Returns:
            Metrics of the batch.
        """
        count = max(self._num_counted, 1.0)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(count)
        of_values = {} if self._objective.value is None else {"critic/value_loss": self._value / count}
        metrics = {
            "actor/policy_loss": self._policy / count,
            **of_values,
            "actor/entropy": self._entropy / count,
            **{f"actor/{name}": value for name, value in self._ratios.metrics().items()},
        }
        self._begin()
        return metrics

    def _begin(self) -> None:
        self._ratios = RatioStatistics()
        self._policy = self._value = self._entropy = self._num_counted = 0.0

    def _losses(self, inputs: Mapping[str, Tensor], sampled: SampledChunks) -> Losses:
        again = self._evaluate(inputs)
        log_probs, values = again["logprobs"], again.get("values")
        assert log_probs is not None
        entropy = again.get("entropy")
        if sampled.proximal_log_probs_BTA is None:
            sampled = replace(sampled, proximal_log_probs_BTA=log_probs.detach())
        objective = replace(self._objective, entropy_weight=0.0) if self.value_only else self._objective
        return chunk_losses(
            sampled,
            log_probs,
            torch.zeros(len(log_probs)) if entropy is None else entropy.reshape(len(log_probs), -1).mean(1),
            None if values is None else values.flatten(),
            objective,
            num_valid=1.0,
        )


class VersionUpdate(Protocol):
    """What trains one policy version.

    Attributes:
        prepares: whether `prepare` does anything.
    """

    prepares: bool

    def prepare(self, samples: ShardSamples) -> None:
        """A trajectory has arrived."""

    def train(self, samples: ShardSamples, scale: Scale) -> None:
        """It may be trained on, with advantages normalised by `scale`."""

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

    def train(self, samples: ShardSamples, scale: Scale) -> None:
        self._gradient.train(samples, scale)

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

    @torch.no_grad()
    def prepare(self, samples: ShardSamples) -> None:
        """Keep what the policy at the beginning of the version says of the chunks."""
        rows = torch.arange(samples.sampled.valid_B.numel()).split(self._micro_batch)
        parts = [self._evaluate({name: value[some] for name, value in samples.inputs.items()}) for some in rows]
        self._proximal[id(samples)] = torch.cat([_log_probs(part) for part in parts])

    def train(self, samples: ShardSamples, scale: Scale) -> None:
        advantages_N = (samples.sampled.advantages_B - scale.mean) / scale.deviation
        proximal = self._proximal.pop(id(samples))
        sampled = replace(samples.sampled, advantages_B=advantages_N, proximal_log_probs_BTA=proximal)
        self._held.append(replace(samples, sampled=sampled))

    def finish(self) -> dict[str, float]:
        """All steps; metrics are means over them."""
        whole, self._held = joined(self._held), []
        values: dict[str, list[float]] = defaultdict(list)
        for _ in range(self._epochs):
            for rows_N in self._mini_batches(whole.sampled.valid_B.numel()):
                self._one.train(whole[rows_N], Scale())
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
    names = [item.name for item in fields(SampledChunks)]
    columns = {name: join([getattr(part.sampled, name) for part in sorted_parts]) for name in names}
    return ShardSamples(
        inputs, SampledChunks(**columns), join([part.counted_N for part in sorted_parts]), num_steps=steps
    )


def _log_probs(outputs: Mapping[str, Tensor | None]) -> Tensor:
    log_probs = outputs["logprobs"]
    assert log_probs is not None
    return log_probs
