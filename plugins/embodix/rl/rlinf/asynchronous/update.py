# SPDX-License-Identifier: Apache-2.0
"""The gradient of a global batch from samples that arrive one by one.

An update is one optimizer step, so until it the policy that is trained is the proximal one of the decoupled objective:
its log-probabilities are those that the forward pass of training gives, and nothing has to be recomputed or
interpolated. What corrects for staleness is its weight over the policy that sampled.

Losses are summed; the step divides gradients by the valid chunks of the whole batch, which need not be known before.

Shape suffix: N chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from embodix.rl.objectives.objective import Losses, ObjectiveSettings, Sampled, chunk_losses
from embodix.rl.objectives.policy_loss import PolicyLossSettings
from embodix.rl.objectives.ratios import RatioStatistics
from embodix.rl.objectives.value_loss import ValueLossSettings
from embodix.rl.scheduling.normalization import Moments, Scale

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
    """

    inputs: Mapping[str, Tensor]
    sampled: Sampled

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
        evaluate: the policy's ``logprobs`` ``[N, T, A]``, ``entropy`` and ``values`` of chunks, with gradients.
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
        self._context = backward_context
        self._ratios = RatioStatistics()
        self._policy = self._value = self._entropy = 0.0

    def train(self, samples: ShardSamples, scale: Scale, version: int) -> None:
        """Add the gradient of a trajectory's chunks, their advantages normalised by `scale`; `version` is the policy's
        that is trained."""
        normalised = (samples.sampled.advantages_B - scale.mean) / scale.deviation
        sampled = replace(samples.sampled, advantages_B=normalised)
        for rows_N in torch.arange(normalised.numel()).split(self._micro_batch):
            inputs = {name: value[rows_N] for name, value in samples.inputs.items()}
            with self._context():
                losses = self._losses(inputs, sampled[rows_N], version)
                losses.total.backward()
            self._ratios += losses.ratios
            self._policy, self._value = self._policy + losses.policy, self._value + losses.value
            self._entropy += losses.entropy

    def finish(self, parameters: Iterable[Tensor], num_valid: float) -> dict[str, float]:
        """Divide the gradients by the valid chunks of the batch, which makes them those of its mean.

        Returns:
            Metrics of the batch.
        """
        count = max(num_valid, 1.0)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(count)
        metrics = {
            "actor/policy_loss": self._policy / count,
            "critic/value_loss": self._value / count,
            "actor/entropy": self._entropy / count,
            **{f"actor/{name}": value for name, value in self._ratios.metrics().items()},
        }
        self._begin()
        return metrics

    def _begin(self) -> None:
        self._ratios = RatioStatistics()
        self._policy = self._value = self._entropy = 0.0

    def _losses(self, inputs: Mapping[str, Tensor], sampled: Sampled, version: int) -> Losses:
        again = self._evaluate(inputs)
        log_probs, values = again["logprobs"], again["values"]
        assert log_probs is not None
        entropy = again.get("entropy")
        return chunk_losses(
            replace(sampled, proximal_log_probs_BTA=log_probs.detach()),
            log_probs,
            torch.zeros(len(log_probs)) if entropy is None else entropy.flatten(1).sum(1),
            None if values is None else values.flatten(),
            self._objective,
            version=version,
            num_valid=1.0,
        )
