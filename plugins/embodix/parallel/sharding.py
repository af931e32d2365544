# SPDX-License-Identifier: Apache-2.0
"""Parameters cut across ranks and gathered a unit at a time (torch's FSDP2).

Source: torch.distributed.fsdp, ``fully_shard`` and ``register_fsdp_forward_method``. What one unit is, a policy's
record says: a joint layer of two stacks reads the parameters of two modules in one function, so the two are one unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from embodix.contracts import ShardUnit
from embodix.policies.units import enter_by


def shard_policy(root: nn.Module, policy: nn.Module, units: Sequence[ShardUnit], mesh: DeviceMesh) -> None:
    """Cut all parameters of ``root`` across a mesh of one dimension, or copy and cut across one of two.

    Args:
        root: what the training loop calls ``forward`` on: the policy, or what stands around it.
        policy: the policy that the units' paths start from.
        units: gathered each by itself; what they leave is gathered with the root.

    Raises:
        ValueError: a path that is no module of the policy, or in two units.
    """
    taken: dict[nn.Module, str] = {}
    for unit in units:
        modules = [_module(policy, path) for path in unit.modules]
        for path, module in zip(unit.modules, modules, strict=True):
            if module in taken:
                raise ValueError(f"A module is in one unit to shard; {path!r} is in that of {taken[module]!r}, too.")
            taken[module] = unit.entry
        fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh)
        entry = _module(policy, unit.entry)
        register_fsdp_forward_method(entry, enter_by(entry))
    fully_shard(root, mesh=mesh)
    register_fsdp_forward_method(root, "forward")


@contextmanager
def gradients_kept_apart(root: Any) -> Iterator[None]:
    """Let the gradients of micro-batches add up on each rank, without exchanging them."""
    assert isinstance(root, FSDPModule)
    root.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        root.set_requires_gradient_sync(True)


def _module(policy: nn.Module, path: str) -> nn.Module:
    try:
        return policy.get_submodule(path)
    except AttributeError as error:
        raise ValueError(f"A unit to shard names {path!r}, which is no module of the policy: {error}.") from error
