# SPDX-License-Identifier: Apache-2.0
"""The accelerator handed to upstream's ``train(cfg, accelerator=...)``: the one public hook into its loop.

Upstream calls ``prepare`` once, before its first step, and then ``autocast``, ``backward``, ``clip_grad_norm_``
and ``unwrap_model`` at fixed places of every step; the optimizer tells when it is about to step. The session is told of
each; what upstream asked for is then done by accelerate itself, or by the placement of a parallel strategy that has
taken the policy over. At these marks, and where the loop asks its loader, a clock splits the step into phases, in
process CPU time and wall time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from embodix.contracts import ComputesWholeSteps, Placement, RankLayout
from embodix.report.steps import PHASES


class StepObserver(Protocol):
    """What a session does at the marks of upstream's loop."""

    def policy_built(self, policy: Any, accelerator: ObservedAccelerator) -> None: ...
    def loader_built(self, loader: Any) -> Any: ...
    def place(self, policy: Any, optimizer: Any) -> Placement | None: ...
    def prepared(self, policy: Any, optimizer: Any, loader: Any, scheduler: Any) -> tuple[Any, Any]: ...
    def forward_starts(self) -> None: ...
    def backward_starts(self, loss: torch.Tensor) -> None: ...
    def backward_ended(self) -> None: ...
    def gradients_clipped(self, grad_norm: Any) -> None: ...
    def optimizer_steps(self) -> None: ...
    def step_ended(self) -> None: ...
    def training_ends(self) -> None: ...


class ObservedAccelerator(Accelerator):
    """Upstream's default accelerator, reporting to a :class:`StepObserver`.

    Args:
        observer: told of each mark.
        force_cpu: upstream's rule: the CPU is forced when ``policy.device`` is ``cpu``.
        layout: of the ranks. ``num_processes`` and ``process_index`` count those that have samples of their own, which
            is what upstream's loop and accelerate's loader mean by them.

    Raises:
        ValueError: accelerate was started with fp16.
    """

    def __init__(
        self, observer: StepObserver, force_cpu: bool, layout: RankLayout | None = None, **kwargs: Any
    ) -> None:
        self._layout = layout
        self._placement: Placement | None = None
        _require_unscaled_losses(kwargs.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION"))
        # The same construction as lerobot_train.train makes when it is given no accelerator.
        super().__init__(
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
            cpu=force_cpu,
            **kwargs,
        )
        self._observer = observer

    @property
    def num_processes(self) -> int:
        return super().num_processes if self._layout is None else self._layout.num_batches

    @property
    def process_index(self) -> int:
        rank = super().process_index
        return rank if self._layout is None else self._layout.batch_index(rank)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) < 4:
            return super().prepare(*args, **kwargs)
        policy, optimizer, loader, scheduler = args
        self._observer.policy_built(policy, self)
        loader = self._observer.loader_built(loader)
        self._placement = placement = self._observer.place(policy, optimizer)
        if placement is None:
            optimizer.register_step_pre_hook(self._optimizer_steps)
            policy, optimizer, loader, scheduler = super().prepare(policy, optimizer, loader, scheduler, **kwargs)
        else:
            placement.optimizer.register_step_pre_hook(self._optimizer_steps)
            policy, optimizer = placement.policy, placement.optimizer
            loader, scheduler = self.prepare_data_loader(loader), scheduler and self.prepare_scheduler(scheduler)
        loader, scheduler = self._observer.prepared(policy, optimizer, loader, scheduler)
        return policy, optimizer, loader, scheduler

    def _optimizer_steps(self, *_: Any) -> None:
        self._observer.optimizer_steps()

    @contextmanager
    def autocast(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        self._observer.forward_starts()
        with super().autocast(*args, **kwargs):
            yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self._observer.backward_starts(loss)
        self.plain_backward(loss, **kwargs)
        self._observer.backward_ended()

    def trust_all_used(self) -> None:
        """Let DDP not search in every step for parameters that got no gradient: there is none."""
        assert self.ddp_handler is not None
        self.ddp_handler.find_unused_parameters = False

    def plain_backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """``backward`` of a micro-batch that upstream's loop knows nothing of."""
        if self._placement is None:
            super().backward(loss, **kwargs)
        else:
            self._placement.backward(loss)

    @property
    def whole_step(self) -> ComputesWholeSteps | None:
        """The placement, where it runs the micro-batches of a step together."""
        return self._placement if isinstance(self._placement, ComputesWholeSteps) else None

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        return super().no_sync(model) if self._placement is None else self._placement.no_sync()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, **kwargs: Any) -> Any:
        if self._placement is None:
            grad_norm = super().clip_grad_norm_(parameters, max_norm, **kwargs)
        else:
            grad_norm = self._placement.clip_grad_norm(max_norm)
        self._observer.gradients_clipped(grad_norm)
        return grad_norm

    def unwrap_model(self, *args: Any, **kwargs: Any) -> Any:
        # update_policy asks for the bare model once, after optimizer and schedule have stepped.
        self._observer.step_ended()
        return super().unwrap_model(*args, **kwargs)

    def end_training(self) -> None:
        self._observer.training_ends()  # what is exchanged between ranks is exchanged before their group is ended
        super().end_training()


def _require_unscaled_losses(mixed_precision: str | None) -> None:
    if mixed_precision is not None and mixed_precision.lower() == "fp16":
        raise ValueError(
            "A run takes each of its steps and continues to the bit. In fp16 accelerate scales the loss and leaves out "
            "steps whose gradients overflow, and upstream saves no scale; accelerate was started with "
            "mixed_precision=fp16. Take bf16 or no: accelerate launch --mixed_precision bf16."
        )


@dataclass
class StepClock:
    """Accumulates the time between marks into the phase that just ended.

    Attributes:
        synchronize: wait for the device before reading the clock, so that GPU phases are exact.
    """

    device: torch.device
    synchronize: bool = False
    cpu_s: dict[str, float] = field(default_factory=dict)
    wall_s: dict[str, float] = field(default_factory=dict)
    _last: tuple[float, float] | None = None

    @property
    def running(self) -> bool:
        return self._last is not None

    def start(self) -> None:
        """Begin a step: the time until the first :meth:`end` belongs to that phase."""
        self.cpu_s = dict.fromkeys(PHASES, 0.0)
        self.wall_s = dict.fromkeys(PHASES, 0.0)
        self._last = self._read()

    def end(self, phase: str) -> None:
        """The time since the last mark was spent in ``phase``."""
        if self._last is None:
            return
        now = self._read()
        self.cpu_s[phase] += now[0] - self._last[0]
        self.wall_s[phase] += now[1] - self._last[1]
        self._last = now

    def stop(self) -> None:
        self._last = None

    def _read(self) -> tuple[float, float]:
        if self.synchronize and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.process_time(), time.perf_counter()
