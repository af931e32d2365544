# SPDX-License-Identifier: Apache-2.0
"""Layers of a policy cut across ranks that share all of them, as its record plans it (torch's tensor parallel styles).

What is not cut every rank computes whole and alike, so its gradients are equal on all of them without an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from embodix.contracts import PolicySupport, TensorPlan


class GatheredModule(ParallelStyle):
    """Parameters cut along their last dimension; the inputs come whole, the output is gathered."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, _cut_last, _as_whole, _gathered)


def _cut_last(path: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        cut = distribute_tensor(parameter, mesh, [Shard(parameter.ndim - 1)])
        module.register_parameter(name, nn.Parameter(cut))


def _as_whole(module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
    return tuple(DTensor.from_local(value, mesh, [Replicate()], run_check=False) for value in inputs)


def _gathered(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Any:
    return output.redistribute(mesh, [Replicate()]).to_local()


STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "columns": ColwiseParallel,
    "rows": RowwiseParallel,
    "rows_of_whole": lambda: RowwiseParallel(input_layouts=Replicate()),
    "gathered_columns": lambda: ColwiseParallel(output_layouts=Replicate()),
    "gathered_modules": GatheredModule,
    "shared_columns": lambda: ColwiseParallel(output_layouts=Replicate(), use_local_output=False),
}
BY_ROWS = ("rows", "rows_of_whole")


@dataclass(frozen=True)
class TensorParts:
    """What of a cut policy the training step still sums itself.

    Attributes:
        policy: with its layers cut.
        summed: names of parameters whose gradients are parts of a sum.
        mesh: of the ranks that share every layer.
    """

    policy: nn.Module
    summed: tuple[str, ...]
    mesh: DeviceMesh

    def sum_gradients(self) -> None:
        """Once a step: gradients of micro-batches add up before."""
        for name in self.summed:
            gradient = self.policy.get_parameter(name).grad
            if gradient is not None:
                own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                dist.all_reduce(own, group=self.mesh.get_group())


def cut_layers(policy: nn.Module, support: PolicySupport, mesh: DeviceMesh) -> TensorParts:
    """Cut the layers of a policy in place; collective over the mesh.

    Raises:
        ValueError: sizes that can't be cut so, a pattern that matches nothing, or a layer that is cut twice.
    """
    plan: TensorPlan = support.tensor_plan(policy)
    require_divisible(plan.counts, mesh.size())
    trained = {name: parameter.requires_grad for name, parameter in policy.named_parameters()}
    for path, kind in planned_cuts(policy, plan).items():
        _cut(policy.get_submodule(path), path, kind, mesh)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(trained[name])
    modules = [path for path, _ in policy.named_modules()]
    for pattern, attribute in plan.heads.items():
        for path in matching(pattern, modules):
            module = policy.get_submodule(path)
            setattr(module, attribute, getattr(module, attribute) // mesh.size())
    summed = [name for pattern in plan.summed_parameters for name in matching(pattern, list(trained))]
    return TensorParts(policy, tuple(summed), mesh)


def require_divisible(counts: Mapping[str, int], num_ranks: int) -> None:
    """
    Raises:
        ValueError: what can't be shared out among the ranks.
    """
    uneven = {what: count for what, count in counts.items() if count % num_ranks}
    if uneven:
        found = ", ".join(f"{count} {what}" for what, count in uneven.items())
        nearest = max(n for n in range(1, num_ranks) if not any(count % n for count in counts.values()))
        other = f"Take parallel.options.size={nearest}, or" if nearest > 1 else "Choose"
        raise ValueError(
            f"parallel=tensor gives every rank the same number of heads; got {found} for {num_ranks} ranks. {other} "
            "parallel=fsdp2."
        )


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """
    Raises:
        ValueError: none does.
    """
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise ValueError(
            f"A plan of cut layers matches something of the policy with every pattern; {pattern!r} does not."
        )
    return found


def planned_cuts(policy: nn.Module, plan: TensorPlan) -> dict[str, str]:
    """Path of every layer that is cut -> how, an attribute of the plan.

    Raises:
        ValueError: a pattern that matches nothing, or a layer that is cut twice.
    """
    modules = [path for path, _ in policy.named_modules()]
    cuts: dict[str, str] = {}
    for kind, path in _planned(plan, modules):
        if path in cuts:
            raise ValueError(f"A layer is cut in one way; {path!r} is in both {cuts[path]} and {kind} of the plan.")
        cuts[path] = kind
    return cuts


def _planned(plan: TensorPlan, modules: Sequence[str]) -> Iterator[tuple[str, str]]:
    for kind in STYLES:
        for pattern in getattr(plan, kind):
            for path in matching(pattern, modules):
                yield kind, path


def _cut(module: nn.Module, path: str, kind: str, mesh: DeviceMesh) -> None:
    features = _cut_features(module, path, kind)
    if features % mesh.size():
        raise ValueError(
            f"parallel=tensor cuts the features of a layer into equal parts; got {features} of {path} for "
            f"{mesh.size()} ranks. Take a parallel.options.size that divides them, or parallel=fsdp2."
        )
    parallelize_module(module, mesh, STYLES[kind]())
    if kind == "shared_columns":
        module.register_forward_hook(_summing_gradients)


def _cut_features(module: nn.Module, path: str, kind: str) -> int:
    """Number of the features that are cut."""
    if kind == "gathered_modules":
        return min(parameter.shape[-1] for parameter in module.parameters())
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    if not isinstance(module, nn.Linear):
        raise ValueError(
            f"parallel=tensor cuts linear layers and embeddings; {path} is a {type(module).__name__}. Train without "
            "adapters and without a precision that replaces layers, or choose parallel=fsdp2."
        )
    return module.in_features if kind in BY_ROWS else module.out_features


def _summing_gradients(module: nn.Module, inputs: Any, output: DTensor) -> Tensor:
    """The gathered output, a gradient of which is a part of each rank's."""
    return output.to_local(grad_placements=[Partial()])
