# SPDX-License-Identifier: Apache-2.0
"""One optimizer step of several micro-batches, inside upstream's loop.

Upstream calls ``policy.forward(batch)`` once and ``accelerator.backward(loss)`` once. For a step of several
micro-batches all but the last are run through forward and backward here, without exchanging gradients; the last is
left to upstream's loop, whose backward exchanges them. A placement that runs all of them together is given the step as
a whole, and nothing is left to upstream's backward. Each loss is a sum over the global count of valid action
elements, over micro-batches and ranks, so that the gradients add up to those of the mean over all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

from embodix.contracts import ComputedPart, ComputesWholeSteps, Installation
from embodix.data.preprocessing import MicroBatches
from embodix.policies.settings import TokenCounts


class StepCount:
    """The count that every loss of a step is divided by: the mean over ranks of the step's valid action elements."""

    def __init__(self) -> None:
        self._mean: Tensor | None = None

    def begin(self, own_count: int, accelerator: Accelerator) -> None:
        """Set the count of a step from what this rank's micro-batches hold."""
        self._mean = over_ranks(torch.tensor(float(own_count), dtype=torch.float64), accelerator, "mean").float()

    def __call__(self, batch_count: Tensor) -> Tensor:
        """The step's count, in place of one batch's."""
        assert self._mean is not None, "a loss outside of a step has no count"
        return self._mean


class BinTimer(Protocol):
    """Measures micro-batches."""

    def bin_started(self) -> None: ...
    def forward_ended(self) -> None: ...
    def bin_ended(self) -> None: ...


class StepForward:
    """Takes the place of ``forward`` on the policy that accelerate prepared.

    Args:
        prepared: the prepared policy, possibly wrapped in DDP.
        installation: the fast path, which counts elements and tokens.
        count: what the fast path's losses are divided by.
        phase_ended: told ``forward`` or ``backward`` when that of a micro-batch before the last has ended.
        timer: told of each micro-batch; the backward of the last is ended by upstream's loop.
        backward: of the micro-batches before the last; None for accelerate's own.
        whole_step: a placement that runs all micro-batches together, which are then not timed; None for none.

    Attributes:
        token_counts: of the whole step over all ranks, None before the first.
    """

    def __init__(
        self,
        prepared: Any,
        accelerator: Accelerator,
        installation: Installation,
        count: StepCount,
        phase_ended: Callable[[str], None],
        timer: BinTimer,
        backward: Callable[[Tensor], None] | None = None,
        whole_step: ComputesWholeSteps | None = None,
    ) -> None:
        self.token_counts: TokenCounts | None = None
        self._prepared, self._accelerator = prepared, accelerator
        self._installation, self._count = installation, count
        self._phase_ended, self._timer = phase_ended, timer
        self._whole_step = whole_step
        self._plain_backward = backward or functools.partial(Accelerator.backward, accelerator)
        self._replaced = prepared.__dict__.get("forward")
        self._forward = prepared.forward
        prepared.forward = self

    def __call__(self, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        """Loss of the step: its value is the step's over all ranks, its gradient that of the last micro-batch."""
        parts: Sequence[Mapping[str, Any]] = batch if isinstance(batch, MicroBatches) else [batch]
        elements = [self._installation.action_elements(part) for part in parts]
        self._count.begin(sum(elements), self._accelerator)
        computed: Sequence[ComputedPart]
        last: Tensor | None = None
        if self._whole_step is None:
            computed, last = self._one_by_one(parts)
        else:
            computed = self._whole_step.forward_step(parts)
        value = over_ranks(torch.stack([part.loss for part in computed]).sum(), self._accelerator, "mean")
        self.token_counts = self._total([part.counts for part in computed])
        logged = _merged([part.logged for part in computed], elements, float(value))
        return value if last is None else _WithValue.apply(last, value), logged

    def _one_by_one(self, parts: Sequence[Mapping[str, Any]]) -> tuple[list[ComputedPart], Tensor]:
        """What was computed, and the loss of the last micro-batch, whose backward is to come."""
        computed = []
        for part in parts[:-1]:
            with self._accelerator.no_sync(self._prepared):
                loss, logged = self._timed_forward(part)
                self._phase_ended("forward")
                self._backward(loss)
                self._phase_ended("backward")
                self._timer.bin_ended()
            computed.append(ComputedPart(loss.detach(), logged, self._counts()))
        last, logged = self._timed_forward(parts[-1])
        return [*computed, ComputedPart(last.detach(), logged, self._counts())], last

    def release(self) -> None:
        """Put the policy's own ``forward`` back."""
        if self._replaced is None:
            del self._prepared.forward
        else:
            self._prepared.forward = self._replaced

    def _timed_forward(self, part: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        self._timer.bin_started()
        loss, logged = self._forward(part)
        self._timer.forward_ended()
        return loss, logged

    def _backward(self, loss: Tensor) -> None:
        """Unobserved, outside of the autocast that upstream's loop holds open."""
        with torch.autocast(loss.device.type, enabled=False):
            self._plain_backward(loss)

    def _counts(self) -> TokenCounts:
        counts = self._installation.token_counts
        assert counts is not None
        return counts

    def _total(self, counts: Sequence[TokenCounts]) -> TokenCounts:
        rows = torch.tensor([dataclasses.astuple(count) for count in counts], dtype=torch.int64)
        return TokenCounts(*over_ranks(rows.sum(dim=0), self._accelerator, "sum").tolist())


class _WithValue(torch.autograd.Function):
    """``apply(loss, value)`` has the gradient of ``loss`` and the value of ``value``."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor) -> Tensor:
        return value.to(loss.dtype).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def over_ranks(value: Tensor, accelerator: Accelerator, reduction: str) -> Tensor:
    """The mean or sum of a value over the ranks that have samples of their own; those that share them have the same."""
    if accelerator.state.num_processes == 1:
        return value
    reduced = accelerator.reduce(value.to(accelerator.device), reduction=reduction)
    assert isinstance(reduced, Tensor)
    sharing = accelerator.state.num_processes // accelerator.num_processes
    return reduced if reduction == "mean" or sharing == 1 else reduced / sharing


def _merged(logged: Sequence[Mapping[str, Any]], elements: Sequence[int], loss: float) -> dict[str, Any]:
    """What the micro-batches logged: means weighted by their action elements, and the step's loss."""
    weights = torch.tensor(elements, dtype=torch.float64) / max(1, sum(elements))
    merged: dict[str, Any] = {}
    for name in logged[-1]:
        values = torch.tensor([own[name] for own in logged], dtype=torch.float64)
        merged[name] = (weights.view(-1, *[1] * (values.ndim - 1)) * values).sum(dim=0).tolist()
    return {**merged, "loss": loss}
