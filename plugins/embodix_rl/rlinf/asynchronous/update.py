# SPDX-License-Identifier: Apache-2.0
"""The gradient of a global batch from samples that arrive one by one.

With one optimizer step a version, the policy that is trained is the proximal one of the decoupled objective until the
step: its log-probabilities are those that the forward pass of training gives, and nothing has to be recomputed or
interpolated. What corrects for staleness is its weight over the policy that sampled. With several steps samples bring
the proximal log-probabilities along (`minibatches`).

Losses are summed; the step divides gradients by the chunks of the whole batch, which need not be known before.

Shape suffix: N chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from embodix_rl.objectives.objective import Losses, ObjectiveSettings, Sampled, chunk_losses
from embodix_rl.objectives.policy_loss import PolicyLossSettings
from embodix_rl.objectives.ratios import RatioStatistics
from embodix_rl.objectives.value_loss import ValueLossSettings
from embodix_rl.scheduling.normalization import Moments, Scale

LEVELS: dict[str, Any] = {"chunk_level": "chunk", "action_level": "action", "token_level": "element"}
Evaluate = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor | None]]


def objective_of(algorithm: Mapping[str, Any], behaviour_cap: float | None) -> ObjectiveSettings:
    """The decoupled objective with the clips of RLinf's node ``algorithm``."""
    value = ValueLossSettings(clip=algorithm["value_clip"], huber_delta=algorithm["huber_delta"])
    return ObjectiveSettings(
        level=LEVELS[algorithm["logprob_type"]],
        proximal="recompute",
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
    """

    inputs: Mapping[str, Tensor]
    sampled: Sampled
    counted_N: Tensor | None = None
    shard: str = ""
    num_steps: int = 0

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
    def moments(self) -> Moments:
        """Of the valid advantages."""
        valid = self.sampled.advantages_B[self.sampled.valid_B].double()
        if not valid.numel():
            return Moments()
        mean = valid.mean()
        return Moments(float(valid.numel()), float(mean), float((valid - mean).square().sum()))


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

    def train(self, samples: ShardSamples, scale: Scale, version: int) -> None:
        """Add the gradient of a trajectory's chunks, their advantages normalised by `scale`; `version` is the policy's
        that is trained."""
        normalised = (samples.sampled.advantages_B - scale.mean) / scale.deviation
        if self.value_only:
            normalised = torch.zeros_like(normalised)
        sampled = replace(samples.sampled, advantages_B=normalised)
        self._num_counted += samples.num_counted
        for rows_N in torch.arange(normalised.numel()).split(self._micro_batch):
            inputs = {name: value[rows_N] for name, value in samples.inputs.items()}
            with self._context():
                losses = self._losses(inputs, sampled[rows_N], version)
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

    def _losses(self, inputs: Mapping[str, Tensor], sampled: Sampled, version: int) -> Losses:
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
            version=version,
            num_valid=1.0,
        )
