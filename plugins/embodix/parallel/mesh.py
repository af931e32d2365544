# SPDX-License-Identifier: Apache-2.0
"""Strategies on a mesh of ranks: copies, cut parameters (FSDP2) and cut layers (tensor parallel), and both together.

The policy stays the object that it was; its parameters become DTensors in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from embodix.contracts import PlacedBytes, PolicySupport, RankBytes, RankLayout, RunTraits, StepUse
from embodix.parallel.gradient_norm import clip_grad_norm
from embodix.parallel.optimizer_state import (
    Repointing,
    local_bytes,
    named_optimizer_state,
    optimizer_bytes,
    set_named_optimizer_state,
    state_like_parameters,
)
from embodix.parallel.rank_bytes import sharded_rank_bytes
from embodix.parallel.sharding import gradients_kept_apart, shard_policy
from embodix.parallel.tensor_cuts import cut_layers
from embodix.policies.adapters import bare_policy

DATA, SHARD, PIPELINE, TENSOR = "data", "shard", "pipeline", "tensor"


class FullyShardedStrategy:
    """``parallel=fsdp2``: parameters, gradients and optimizer state cut across ranks, gathered a unit at a time.

    Args:
        shard: ranks that share one copy; null for all. Fewer make copies of the cut policy (hybrid).
    """

    name = "fsdp2"
    keeps_whole = False

    def __init__(self, shard: int | None = None) -> None:
        self._shard = shard

    def layout(self, num_processes: int) -> RankLayout:
        shard = num_processes if self._shard is None else self._shard
        require_divisor("parallel.options.shard", shard, num_processes)
        return RankLayout(data=num_processes // shard, shard=shard)

    def faults(self, run: RunTraits, layout: RankLayout) -> Iterator[str]:
        yield from sharding_faults(self.name, run, layout)

    def place(
        self, policy: Any, optimizer: Any, device: torch.device, layout: RankLayout, support: PolicySupport
    ) -> MeshPlacement:
        return MeshPlacement(policy, optimizer, device, layout, support)

    def rank_bytes(
        self, policy: Any, layout: RankLayout, support: PolicySupport, use: StepUse, rank: int = 0
    ) -> RankBytes:
        return sharded_rank_bytes(policy, support.shard_units(bare_policy(policy)), layout, use, rank)


def require_divisor(option: str, size: int, num_processes: int) -> None:
    """
    Raises:
        ValueError: ranks can't be arranged in groups of this size.
    """
    if size < 1 or num_processes % size:
        divisors = [str(n) for n in range(1, num_processes + 1) if num_processes % n == 0]
        raise ValueError(
            f"{option} divides the number of processes; got {size} for {num_processes}. "
            f"Take one of {', '.join(divisors)}."
        )


def sharding_faults(name: str, run: RunTraits, layout: RankLayout) -> Iterator[str]:
    """Why a run's parameters can't be cut and gathered a unit at a time."""
    if layout.shard < 2:
        yield (
            f"parallel={name} cuts parameters across 2 ranks at least; got {layout.shard}. Start more processes, or "
            "choose parallel=ddp."
        )
    if not run.support.offers("shard_units"):
        yield (
            f"parallel={name} gathers the units that a policy's record names, and {run.support.display_name}'s names "
            "none. Choose parallel=ddp."
        )
    elif not run.packed:
        yield (
            f"parallel={name} gathers units where the packed computation enters them, which upstream's own reads past; "
            "got packing=none with attention=upstream and vision_tokens=upstream. Add +plugin=embodix, or choose "
            "parallel=ddp."
        )


class MeshPlacement:
    """A policy in place on a mesh; see ``embodix.contracts.Placement``."""

    def __init__(
        self, policy: Any, optimizer: Any, device: torch.device, layout: RankLayout, support: PolicySupport
    ) -> None:
        self.policy, self.optimizer, self.layout = policy, optimizer, layout
        self.strategy, self.backend = strategy_name(layout), dist.get_backend()
        self._total = sum(local_bytes(parameter) for parameter in policy.parameters())
        self._gradients_kept_apart = False
        mesh = rank_mesh(device, layout)
        repointing = Repointing(policy, optimizer)
        bare = bare_policy(policy)
        self._tensor_parts = cut_layers(bare, support, mesh[TENSOR]) if layout.tensor > 1 else None
        if layout.num_batches > 1:
            shard_policy(policy, bare, support.shard_units(bare), batch_mesh(mesh, layout))
        repointing.apply()
        if layout.tensor > 1:
            step_each_by_itself(optimizer)

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        if self._tensor_parts is not None and not self._gradients_kept_apart:
            self._tensor_parts.sum_gradients()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._gradients_kept_apart = True
        try:
            with gradients_kept_apart(self.policy) if self.layout.num_batches > 1 else nullcontext():
                yield
        finally:
            self._gradients_kept_apart = False

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        return clip_grad_norm(self.policy.parameters(), max_norm)

    def placed_bytes(self) -> PlacedBytes:
        return placed_bytes(self.policy, self.optimizer, self._total)

    def state(self) -> dict[str, Any]:
        model = dict(self.policy.state_dict())
        return {"model": model, "optimizer": named_optimizer_state(self.policy, self.optimizer)}

    def optimizer_template(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return self._template(name, shape, dtype)

    @functools.cached_property
    def _template(self) -> Callable[[str, torch.Size, torch.dtype], Tensor]:
        return state_like_parameters(self.policy)

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        set_named_optimizer_state(self.policy, self.optimizer, state)

    def release(self) -> None:
        """Nothing: torch does not gather a sharded policy again, which ends with its run."""


def strategy_name(layout: RankLayout) -> str:
    """What spreads a policy so, in words."""
    names = ["tensor parallel"] if layout.tensor > 1 else []
    return " and ".join([*names, *(["FSDP2"] if layout.num_batches > 1 else [])])


def step_each_by_itself(optimizer: torch.optim.Optimizer) -> None:
    """torch's steps of many tensors at once take no plain tensors together with cut ones, nor those of two meshes."""
    for group in optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = False


def rank_mesh(device: torch.device, layout: RankLayout) -> DeviceMesh:
    """All ranks, in the order of ``RankLayout``."""
    sizes = (layout.data, layout.shard, layout.pipeline, layout.tensor)
    return init_device_mesh(device.type, sizes, mesh_dim_names=(DATA, SHARD, PIPELINE, TENSOR))


def batch_mesh(mesh: DeviceMesh, layout: RankLayout) -> DeviceMesh:
    """The ranks that have samples of their own: one dimension, or two where there are copies of what is cut."""
    return mesh[SHARD] if layout.data == 1 else mesh[DATA, SHARD]


def placed_bytes(policy: nn.Module, optimizer: torch.optim.Optimizer, total: int) -> PlacedBytes:
    """What this rank holds of a policy whose cut parameters are DTensors."""
    sharded = replicated = 0
    for parameter in policy.parameters():
        if is_cut(parameter):
            sharded += local_bytes(parameter)
        else:
            replicated += local_bytes(parameter)
    return PlacedBytes(sharded, replicated, optimizer_bytes(optimizer), total)


def is_cut(tensor: Tensor) -> bool:
    """Whether other ranks hold other parts of a tensor."""
    if not isinstance(tensor, DTensor):
        return False
    sizes = tensor.device_mesh.shape
    return any(not place.is_replicate() and size > 1 for place, size in zip(tensor.placements, sizes, strict=True))
