# SPDX-License-Identifier: Apache-2.0
"""A policy's parameters and its optimizer's state by name, and moving that state when the parameters are replaced.

Sharding replaces a policy's parameters by DTensors, while upstream has made the optimizer, and has possibly loaded its
state, before. ``Repointing`` remembers which parameter had which name and hands the optimizer the ones that stand in
their place, each tensor of state cut like its parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

SEPARATOR = "::"  # between a parameter's name and that of a tensor of its state; names have single dots only


class Repointing:
    """Made before a policy's parameters are replaced, applied after.

    Args:
        policy: whose parameters are replaced.
        optimizer: torch's, over parameters of the policy.
    """

    def __init__(self, policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._policy, self._optimizer = policy, optimizer
        self._names = {id(parameter): name for name, parameter in policy.named_parameters()}

    def apply(self) -> None:
        """Let the optimizer step the parameters that have the same names now; the order of its groups stays."""
        found = dict(self._policy.named_parameters())
        for group in self._optimizer.param_groups:
            before = group["params"]
            after = [found[self._names[id(parameter)]] for parameter in before]
            for old, new in zip(before, after, strict=True):
                if old in self._optimizer.state and new is not old:
                    state = self._optimizer.state.pop(old)
                    self._optimizer.state[new] = {key: _cut_like(new, old, value) for key, value in state.items()}
            group["params"] = after


def _cut_like(parameter: Tensor, whole: Tensor, value: Any) -> Any:
    if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == whole.shape:
        return own_part(value, parameter)
    return value


def own_part(value: Tensor, like: DTensor) -> DTensor:
    """A tensor that every rank has whole, cut as another of its shape. What is cut twice is cut by layers first."""
    mesh, part = like.device_mesh, value
    for mesh_dim in reversed(range(mesh.ndim)):
        place: Any = like.placements[mesh_dim]
        if not place.is_replicate():
            part = _chunk(part, place.dim, mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim))
    assert part.shape == like.to_local().shape
    stride = like.stride()
    return DTensor.from_local(part.clone(), mesh, like.placements, run_check=False, shape=like.shape, stride=stride)


def _chunk(value: Tensor, dim: int, num_parts: int, index: int) -> Tensor:
    """As DTensors are cut: equal parts, the last ones possibly smaller or empty."""
    size = -(-value.shape[dim] // num_parts)
    start = min(index * size, value.shape[dim])
    return value.narrow(dim, start, min(size, value.shape[dim] - start))


def named_optimizer_state(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Tensors of the optimizer's state by ``<parameter>::<key>``; those of parameters without a gradient are absent."""
    named: dict[str, Any] = {}
    for name, parameter in policy.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            named[f"{name}{SEPARATOR}{key}"] = value
    return named


def set_named_optimizer_state(policy: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Take a state of ``named_optimizer_state``; what it does not name has no state.

    Raises:
        ValueError: a name that is no parameter of the policy.
    """
    parameters = dict(policy.named_parameters())
    optimizer.state.clear()
    for full, value in state.items():
        name, _, key = full.partition(SEPARATOR)
        if name not in parameters:
            raise ValueError(f"The optimizer's state names {name!r}, which is no parameter of this policy.")
        optimizer.state[parameters[name]][key] = value


def state_like_parameters(policy: nn.Module) -> Callable[[str, torch.Size, torch.dtype], Tensor]:
    """Makes empty tensors of state, cut like the parameters of a policy: of a name, a shape and a dtype."""
    parameters = dict(policy.named_parameters())

    def template(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        parameter = parameters.get(name)
        if parameter is None:
            raise ValueError(f"The optimizer's state names {name!r}, which is no parameter of this policy.")
        if parameter.shape != shape:
            return torch.empty(shape, dtype=dtype)  # a count of steps
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)

    return template


def local_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor on this rank."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.numel() * own.element_size()


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state on this rank."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(local_bytes(value) for value in values if isinstance(value, Tensor))
