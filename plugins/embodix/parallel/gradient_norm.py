# SPDX-License-Identifier: Apache-2.0
"""The norm of gradients of which ranks hold parts, and clipping by it.

torch's own ``clip_grad_norm_`` takes gradients that are all cut alike; here some are cut across one dimension of the
mesh, some across two, and some are whole on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

CLIP_EPS = 1e-6  # torch.nn.utils.clip_grads_with_norm_


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients so that their norm over all ranks is at most ``max_norm``; returns the norm before."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = gradient_norm(gradients)
    scale_down([part for part in (_local(gradient) for gradient in gradients) if part.numel()], norm, max_norm)
    return norm


def scale_down(parts: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale plain tensors, parts of gradients of this norm, to ``max_norm`` at most."""
    if parts and max_norm != float("inf"):
        torch._foreach_mul_(parts, torch.clamp(max_norm / (norm + CLIP_EPS), max=1.0))


def square_sum(parts: list[Tensor]) -> Tensor:
    """Sum of the squares of plain tensors, one at least, in float64."""
    return torch.stack(torch._foreach_norm(parts)).double().square().sum()


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """2-norm of all gradients together, whatever part of each this rank holds; the same on every rank."""
    by_cut: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_cut[_cut_of(gradient)].append(_local(gradient))
    squares = []
    for (mesh, dims), parts in by_cut.items():
        square = square_sum(parts)
        for dim in dims:
            assert mesh is not None
            dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    return torch.stack(squares).sum().sqrt().float() if squares else torch.zeros(())


def _cut_of(gradient: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """The mesh, and its dimensions across which the tensor is cut."""
    if not isinstance(gradient, DTensor):
        return None, ()
    return gradient.device_mesh, tuple(dim for dim, place in enumerate(gradient.placements) if not place.is_replicate())


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
