# SPDX-License-Identifier: Apache-2.0
"""The update of one batch of chunks in this process: epochs, global batches, micro-batches.

Runners of a framework have loops of their own; this one is what they are compared with, and what examples run.

Shape suffix: B chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from embodix_rl.objectives.objective import Losses, ObjectiveSettings, Sampled, chunk_losses
from embodix_rl.objectives.ratios import RatioStatistics

Inputs = Mapping[str, Tensor]


class Evaluated(Protocol):
    """Recomputed chunks: ``log_probs`` ``[B, T, A]``, ``entropy`` ``[B]`` and ``values`` ``[B]`` or None."""

    @property
    def log_probs(self) -> Tensor: ...

    @property
    def entropy(self) -> Tensor: ...

    @property
    def values(self) -> Tensor | None: ...


class Evaluates(Protocol):
    """A policy that recomputes chunks from what its rollout kept."""

    def evaluate(self, forward_inputs: Inputs) -> Evaluated: ...


@dataclass(frozen=True)
class UpdateSettings:
    """How a batch is used.

    Attributes:
        num_epochs: times that each chunk is trained on.
        global_batch: chunks of one optimizer step.
        micro_batch: chunks that are computed at a time; the step is the same whatever it is.
        max_grad_norm: gradients longer than this are shortened; None for no bound.
        max_kl: no further epoch begins once the approximate KL divergence of the last one is beyond this; None for no
            bound.
    """

    num_epochs: int = 1
    global_batch: int = 64
    micro_batch: int = 64
    max_grad_norm: float | None = 1.0
    max_kl: float | None = None

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("num_epochs", "global_batch", "micro_batch")}
        if min(counts.values()) < 1:
            raise ValueError(f"Epochs and batches are 1 at least; got {counts}.")


@dataclass(frozen=True)
class UpdateMetrics:
    """What an update did.

    Attributes:
        num_steps, num_epochs: optimizer steps and epochs that were taken.
        policy_loss, value_loss: means over the steps.
        grad_norm: mean over the steps, before it was shortened.
        ratios: of the last epoch.
    """

    num_steps: int
    num_epochs: int
    policy_loss: float
    value_loss: float
    grad_norm: float
    ratios: dict[str, float]


def update(
    policy: Evaluates,
    optimizer: torch.optim.Optimizer,
    inputs: Inputs,
    sampled: Sampled,
    objective: ObjectiveSettings,
    settings: UpdateSettings,
    *,
    version: int,
    generator: torch.Generator | None = None,
) -> UpdateMetrics:
    """Train on a batch.

    Args:
        inputs: the rollout's ``forward_inputs``.
        sampled: log-probabilities, advantages and returns; with ``proximal=recompute`` the proximal log-probabilities
            are computed here, before the first step.
        version: of the policy before the update.
        generator: decides the order of the chunks.
    """
    num_chunks = sampled.valid_B.numel()
    if objective.proximal == "recompute":
        sampled = replace(sampled, proximal_log_probs_BTA=_log_probs(policy, inputs, num_chunks, settings.micro_batch))
    steps: list[tuple[list[Losses], float]] = []
    ratios, epoch = RatioStatistics(), 0
    while epoch < settings.num_epochs:
        epoch, ratios = epoch + 1, RatioStatistics()
        for rows_B in torch.randperm(num_chunks, generator=generator).split(settings.global_batch):
            losses = _accumulate(policy, inputs, sampled, objective, settings.micro_batch, rows_B, version)
            steps.append((losses, _step(optimizer, settings.max_grad_norm)))
            ratios = sum((part.ratios for part in losses), ratios)
        if settings.max_kl is not None and ratios.metrics().get("approx_kl", 0.0) > settings.max_kl:
            break
    return UpdateMetrics(
        num_steps=len(steps),
        num_epochs=epoch,
        policy_loss=sum(part.policy for losses, _ in steps for part in losses) / len(steps),
        value_loss=sum(part.value for losses, _ in steps for part in losses) / len(steps),
        grad_norm=sum(norm for _, norm in steps) / len(steps),
        ratios=ratios.metrics(),
    )


def _accumulate(
    policy: Evaluates,
    inputs: Inputs,
    sampled: Sampled,
    objective: ObjectiveSettings,
    micro_batch: int,
    rows_B: Tensor,
    version: int,
) -> list[Losses]:
    """Gradients of one global batch, whose micro-batches add up to its mean."""
    num_valid = float(sampled.valid_B[rows_B].sum())
    parts = []
    for rows_R in rows_B.split(micro_batch):
        again = policy.evaluate({key: value[rows_R] for key, value in inputs.items()})
        losses = chunk_losses(
            sampled[rows_R],
            again.log_probs,
            again.entropy,
            again.values,
            objective,
            version=version,
            num_valid=num_valid,
        )
        losses.total.backward()
        parts.append(losses)
    return parts


def _step(optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> float:
    """One optimizer step; the norm of its gradient."""
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    bound = float("inf") if max_grad_norm is None else max_grad_norm
    norm = float(torch.nn.utils.clip_grad_norm_(trained, bound))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


@torch.no_grad()
def _log_probs(policy: Evaluates, inputs: Inputs, num_chunks: int, micro_batch: int) -> Tensor:
    parts = torch.arange(num_chunks).split(micro_batch)
    return torch.cat(
        [policy.evaluate({key: value[rows_R] for key, value in inputs.items()}).log_probs for rows_R in parts]
    )
