# SPDX-License-Identifier: Apache-2.0
"""A pipeline: ranks hold some layers each, and the micro-batches of a step go through all of them (1F1B).

Source: torch.distributed.pipelining, ``PipelineStage`` and ``Schedule1F1B``. Every rank of a pipeline gets the whole
batch, so that only activations and their gradients are exchanged; masks, positions and noise are made on each rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from embodix.contracts import ComputedPart, PipelineStages, PlacedBytes, PolicySupport, RankLayout, RunTraits
from embodix.parallel.gradient_norm import gradient_norm, scale_down
from embodix.parallel.mesh import DATA, PIPELINE, rank_mesh, require_divisor
from embodix.parallel.optimizer_state import (
    SEPARATOR,
    local_bytes,
    named_optimizer_state,
    optimizer_bytes,
    set_named_optimizer_state,
    state_like_parameters,
)

Shape = tuple[tuple[torch.Size, torch.dtype], ...]


class PipelineStrategy:
    """``parallel=pipeline``: each rank holds some layers, and the micro-batches of a step pass through all of them.

    Args:
        size: stages; null for all ranks. Fewer make copies of the pipeline.
    """

    name = "pipeline"
    keeps_whole = False

    def __init__(self, size: int | None = None) -> None:
        self._size = size

    def layout(self, num_processes: int) -> RankLayout:
        size = num_processes if self._size is None else self._size
        require_divisor("parallel.options.size", size, num_processes)
        return RankLayout(data=num_processes // size, pipeline=size)

    def faults(self, run: RunTraits, layout: RankLayout) -> Iterator[str]:
        if layout.pipeline < 2:
            yield (
                f"parallel=pipeline has 2 stages at least; got {layout.pipeline}. Start more processes, or choose "
                "parallel=ddp."
            )
        if not run.support.offers("pipeline_stages"):
            yield (
                "parallel=pipeline computes the stages that a policy's record names, and "
                f"{run.support.display_name}'s names none. Choose parallel=fsdp2."
            )
        if run.precision != "none":
            yield (
                "parallel=pipeline keeps no parameters of other stages, which a training precision reads as it is "
                f"put in place; got precision={run.precision}. Choose precision=none, or parallel=ddp."
            )
        yield from _shape_faults(run, layout)

    def place(
        self, policy: Any, optimizer: Any, device: torch.device, layout: RankLayout, support: PolicySupport
    ) -> PipelinePlacement:
        return PipelinePlacement(policy, optimizer, device, layout, support)


def _shape_faults(run: RunTraits, layout: RankLayout) -> Iterator[str]:
    """Why its micro-batches can't follow each other through the stages."""
    if run.num_shapes is None:
        yield (
            "parallel=pipeline exchanges activations of one fixed shape, which a packer for fixed shapes makes; got "
            f"packing={run.packing}. Choose packing=sequence_length with packing.options.num_shapes=1."
        )
    elif run.num_shapes > 1:
        yield (
            "parallel=pipeline exchanges activations of one fixed shape; got packing.options.num_shapes="
            f"{run.num_shapes}. Set it to 1."
        )
    if run.bins_per_step < layout.pipeline:
        yield (
            f"parallel=pipeline fills {layout.pipeline} stages with as many micro-batches a step at least; got "
            f"packing.options.bins_per_step={run.bins_per_step}. Set it to {layout.pipeline} or more: stages wait for "
            "one another less, the more there are."
        )


class PipelinePlacement:
    """One stage of a policy in place on this rank; see ``embodix.contracts.Placement`` and ``ComputesWholeSteps``."""

    def __init__(
        self, policy: Any, optimizer: Any, device: torch.device, layout: RankLayout, support: PolicySupport
    ) -> None:
        self.policy, self.optimizer, self.layout = policy, optimizer, layout
        self.backend = dist.get_backend()
        self._device = device
        self._total = sum(local_bytes(parameter) for parameter in policy.parameters())
        self._names = frozenset(name for name, _ in policy.named_parameters())
        self._stages = support.pipeline_stages(policy, layout.pipeline)
        self.strategy = f"pipeline (1F1B), {self._stages.cut}"
        self._mesh = rank_mesh(device, layout)
        self._stage = self._mesh.get_local_rank(PIPELINE)
        self._runner = StageRunner(self._stages, self._stage, layout.pipeline, device, self._mesh.get_group(PIPELINE))
        keep_parameters(policy, optimizer, self._stages.parameters[self._stage])

    def forward_step(self, parts: Sequence[Mapping[str, Any]]) -> Sequence[ComputedPart]:
        prepared = [self._stages.prepare(part) for part in parts]
        outcomes = self._runner.run(prepared)
        average_gradients(self.policy, self._mesh, self._device)
        return [
            ComputedPart(torch.tensor(loss, device=self._device), logged, self._stages.counts(part))
            for part, (loss, logged) in zip(prepared, outcomes, strict=True)
        ]

    def backward(self, loss: Tensor) -> None:
        """Nothing: ``forward_step`` has done it."""

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        gradients = [parameter.grad for parameter in self.policy.parameters() if parameter.grad is not None]
        square = gradient_norm(gradients).to(self._device, torch.float64).square()
        dist.all_reduce(square, group=self._mesh.get_group(PIPELINE))
        norm = square.sqrt().float()
        scale_down(gradients, norm, max_norm)
        return norm

    def placed_bytes(self) -> PlacedBytes:
        held = sum(local_bytes(parameter) for parameter in self.policy.parameters())
        return PlacedBytes(held, 0, optimizer_bytes(self.optimizer), self._total)

    def state(self) -> dict[str, Any]:
        model = dict(self.policy.state_dict())
        return {"model": model, "optimizer": named_optimizer_state(self.policy, self.optimizer)}

    def optimizer_template(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        if name in self._names - self._stages.parameters[self._stage]:
            return None
        return self._template(name, shape, dtype)

    @functools.cached_property
    def _template(self) -> Callable[[str, torch.Size, torch.dtype], Tensor]:
        return state_like_parameters(self.policy)

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        foreign = self._names - self._stages.parameters[self._stage]
        own = {full: value for full, value in state.items() if full.partition(SEPARATOR)[0] not in foreign}
        set_named_optimizer_state(self.policy, self.optimizer, own)

    def release(self) -> None:
        """Nothing: what other stages hold does not come back, and the policy ends with its run."""


def keep_parameters(policy: nn.Module, optimizer: torch.optim.Optimizer, names: frozenset[str]) -> None:
    """Free all parameters but these, in the policy and in its optimizer; the optimizer's groups stay in their order.

    A module keeps ``None`` in the place of a parameter, under all the names that it has.
    """
    kept = {id(parameter) for name, parameter in policy.named_parameters() if name in names}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in kept:
                optimizer.state.pop(parameter, None)
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in kept]
    for module in policy.modules():
        for name, own in list(module._parameters.items()):
            if own is not None and id(own) not in kept:
                module._parameters[name] = None


def average_gradients(policy: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Average over the copies of a stage; a gradient that none of them has stays None, as under DDP."""
    group = mesh.get_group(DATA)
    num_copies = group.size()
    if num_copies == 1:
        return
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    found = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device=device)
    dist.all_reduce(found, group=group)
    for parameter, num_found in zip(parameters, found.tolist(), strict=True):
        if num_found:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient, group=group)
            parameter.grad = gradient.div_(num_copies)


class StageRunner:
    """Runs the micro-batches of a step through this rank's stage, in the order of 1F1B.

    Args:
        stage: of this rank.
        group: the ranks of its pipeline.
    """

    def __init__(
        self,
        stages: PipelineStages,
        stage: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        self._stages, self._stage, self._num_stages = stages, stage, num_stages
        self._device, self._group = device, group
        self._computation = StageComputation(stages, stage, device)
        self._schedules: dict[tuple[Shape, int], Schedule1F1B] = {}

    def run(self, prepared: Sequence[Any]) -> list[tuple[float, dict[str, Any]]]:
        """Loss and what is logged of each micro-batch, the same on every rank of the pipeline.

        Raises:
            ValueError: micro-batches of several shapes, or fewer of them than stages.
        """
        schedule = self._schedule_of(prepared)
        index_N = torch.arange(len(prepared))
        self._computation.begin(prepared)
        with torch.autocast(self._device.type, enabled=False):
            schedule.step(index=index_N, target=index_N, return_outputs=False)
        outcomes: list[Any] = [self._computation.outcomes]
        last = dist.get_global_rank(self._group, self._num_stages - 1)
        dist.broadcast_object_list(outcomes, src=last, group=self._group, device=self._device)
        return list(outcomes[0])

    def _schedule_of(self, prepared: Sequence[Any]) -> Schedule1F1B:
        shapes = [self._shape(self._stage, part) + self._shape(0, part) for part in prepared]
        if len(set(shapes)) > 1:
            found = " and ".join(sorted({str([tuple(size) for size, _ in shape]) for shape in shapes}))
            raise ValueError(
                f"The micro-batches of a pipeline's step have one shape; got {found}. Set packing.options.num_shapes=1."
            )
        if len(prepared) < self._num_stages:
            raise ValueError(
                f"A pipeline of {self._num_stages} stages takes as many micro-batches a step at least; got "
                f"{len(prepared)}. Set packing.options.bins_per_step={self._num_stages} or more."
            )
        key = shapes[0], len(prepared)
        if key not in self._schedules:
            self._schedules[key] = self._build(prepared[0], len(prepared))
        return self._schedules[key]

    def _shape(self, stage: int, part: Any) -> Shape:
        return tuple((tensor.shape, tensor.dtype) for tensor in self._stages.sent(stage, part))

    def _build(self, like: Any, num_parts: int) -> Schedule1F1B:
        received = self._stages.sent(self._stage - 1, like) if self._stage else ()
        stage = PipelineStage(
            self._computation,
            self._stage,
            self._num_stages,
            self._device,
            input_args=received,
            output_args=self._stages.sent(self._stage, like),
            group=self._group,
        )
        # Losses are sums over the step's count, so that gradients add up as they are.
        return Schedule1F1B(stage, num_parts, loss_fn=self._computation.loss, scale_grads=False)


class StageComputation(nn.Module):
    """One stage as torch's schedule calls it, by the index of a micro-batch; what it knows of them stays on the rank.

    Attributes:
        outcomes: loss and what is logged of each micro-batch, on the last stage.
    """

    def __init__(self, stages: PipelineStages, stage: int, device: torch.device) -> None:
        super().__init__()
        self.outcomes: list[tuple[float, dict[str, Any]]] = []
        self._stages, self._stage, self._device_type = stages, stage, device.type
        self._prepared: Sequence[Any] = ()
        self._precision: tuple[bool, torch.dtype] = (False, torch.float32)

    def begin(self, prepared: Sequence[Any]) -> None:
        """Take the micro-batches of a step, and the autocast in force: backward passes between them have none."""
        kind = self._device_type
        self._precision = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self.outcomes, self._prepared = [], prepared

    def forward(self, *received: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        with self._autocast():
            return self._stages.compute(self._stage, self._prepared[int(index)], *received)

    def loss(self, output: tuple[Tensor, ...], index: Tensor) -> Tensor:
        with self._autocast():
            loss, logged = self._stages.loss(self._prepared[int(index)], *output)
        self.outcomes.append((loss.item(), logged))
        return loss

    def _autocast(self) -> torch.autocast:
        enabled, dtype = self._precision
        return torch.autocast(self._device_type, dtype=dtype, enabled=enabled)
