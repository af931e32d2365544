# SPDX-License-Identifier: Apache-2.0
"""What the fast paths compute alike: autograd functions in fewer passes over memory, and the loss of an action chunk.

Each function keeps only its inputs for the backward pass and writes into its own results where plain autograd would
allocate. The loss is over valid elements: steps that exist, dimensions that a sample has.

Shape suffixes: N rows, W width, H heads, D head_dim; B samples, F flow samples an observation, T action steps, A action
dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import zeros as distributed_zeros


class ZeroGradient(torch.autograd.Function):
    """``apply(value, *unused)`` is ``value``; the unused tensors get gradients of exact zeros instead of None."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *unused: Tensor) -> Tensor:
        ctx.unused = [_zeros_like_later(tensor) for tensor in unused]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        zeros = [make_zeros() if need else None for need, make_zeros in zip(needed, ctx.unused, strict=True)]
        return gradient, *zeros


def _zeros_like_later(tensor: Tensor) -> Callable[[], Tensor]:
    """Makes zeros like a tensor, cut across ranks as it is, without keeping the tensor."""
    if not isinstance(tensor, DTensor):
        return partial(torch.zeros, tensor.shape, dtype=tensor.dtype, device=tensor.device)
    mesh, placements = tensor.device_mesh, tensor.placements
    return partial(distributed_zeros, tensor.shape, dtype=tensor.dtype, device_mesh=mesh, placements=placements)


ZERO_GRADIENT = "embodix_zero_gradient"


def with_zero_gradients(value: Tensor, *unused: Tensor) -> Tensor:
    """``value``; the unused parameters get gradients of exact zeros.

    One that is not here in its shape, since other ranks hold parts of it, has an attribute ``ZERO_GRADIENT``: it is
    called in place of a gradient.
    """
    here = [parameter for parameter in unused if not hasattr(parameter, ZERO_GRADIENT)]
    for parameter in unused:
        if hasattr(parameter, ZERO_GRADIENT) and torch.is_grad_enabled():
            getattr(parameter, ZERO_GRADIENT)()
    out: Tensor = ZeroGradient.apply(value, *here)
    return out


class RmsNorm(torch.autograd.Function):
    """``x / rms(x) * gain`` over the last dimension, computed in fp32 and returned in the dtype of ``x``."""

    @staticmethod
    def forward(ctx: Any, x_NW: Tensor, gain_W: Tensor, eps: float) -> Tensor:
        wide_NW = x_NW.float()
        norm_N1 = torch.linalg.vector_norm(wide_NW, dim=-1, keepdim=True)
        inverse_N1 = norm_N1.square_().div_(x_NW.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x_NW, gain_W, inverse_N1)
        return (wide_NW * inverse_N1).mul_(gain_W.float()).type_as(x_NW)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_NW: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_NW, gain_W, inverse_N1 = ctx.saved_tensors
        wide_NW, slope_NW, wide_gain_W = x_NW.float(), slope_NW.float(), gain_W.float()
        product_NW = slope_NW * wide_NW
        grad_gain = None
        if ctx.needs_input_grad[1]:
            grad_gain = (product_NW.flatten(0, -2).t() @ inverse_N1.flatten(0, -2)).squeeze(1).to(gain_W.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_gain, None
        pull_N1 = (product_NW @ wide_gain_W)[..., None] * inverse_N1.pow(3) / -x_NW.shape[-1]
        grad_NW = torch.mul(slope_NW, wide_gain_W, out=product_NW).mul_(inverse_N1).addcmul_(wide_NW, pull_N1)
        return grad_NW.to(x_NW.dtype), grad_gain, None


def gemma_rms_norm(x_NW: Tensor, weight_W: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * (1 + weight)`` (Gemma's convention)."""
    out_NW: Tensor = RmsNorm.apply(x_NW, 1.0 + weight_W.float(), eps)
    return out_NW


class GatedSilu(torch.autograd.Function):
    """``silu(gate) * up``; the activation is not kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate, up = ctx.saved_tensors
        grad_gate = grad_up = None
        if ctx.needs_input_grad[0]:
            grad_gate = slope * up
            torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        if ctx.needs_input_grad[1]:
            grad_up = F.silu(gate).mul_(slope)
        return grad_gate, grad_up


# gelu(x) = x * sigmoid(GELU_LINEAR * x + GELU_CUBIC * x**3) is the tanh approximation written with a sigmoid.
GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715 * GELU_LINEAR
# Elements worked on at a time on a CPU, so that several passes stay in its L2 cache.
CACHED_ELEMENTS = 2**18


class GatedGelu(torch.autograd.Function):
    """``gelu(gate) * up`` with the tanh approximation; the activation is not kept.

    In fp32 on a CPU torch's sigmoid is several times faster than the tanh inside its gelu, so it is used there.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if not _prefers_sigmoid(gate):
            return F.gelu(gate, approximate="tanh").mul_(up)
        out = gate.new_empty(gate.shape)
        for gate_c, up_c, out_c in _cached_chunks(gate, up, out):
            _gelu_sigmoid(gate_c, out=out_c).mul_(gate_c).mul_(up_c)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate, up = ctx.saved_tensors
        if _prefers_sigmoid(gate):
            return _gated_gelu_slopes(gate, up, slope)
        grad_gate = grad_up = None
        if ctx.needs_input_grad[0]:
            grad_gate = slope * up
            torch.ops.aten.gelu_backward.grad_input(grad_gate, gate, approximate="tanh", grad_input=grad_gate)
        if ctx.needs_input_grad[1]:
            grad_up = F.gelu(gate, approximate="tanh").mul_(slope)
        return grad_gate, grad_up


def _prefers_sigmoid(gate: Tensor) -> bool:
    return gate.dtype == torch.float32 and gate.device.type == "cpu"


def _cached_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of every tensor, few enough to stay in the cache."""
    rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
    return zip(*(part.split(max(1, CACHED_ELEMENTS // part.shape[-1])) for part in rows), strict=True)


def _gelu_sigmoid(x: Tensor, out: Tensor) -> Tensor:
    """``sigmoid(GELU_LINEAR * x + GELU_CUBIC * x**3)`` in ``out``."""
    return torch.mul(x, x, out=out).mul_(GELU_CUBIC).add_(GELU_LINEAR).mul_(x).sigmoid_()


def _gated_gelu_slopes(gate: Tensor, up: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``gelu(gate) * up``: d gelu / dx = s + s (1 - s) x (GELU_LINEAR + 3 GELU_CUBIC x**2)."""
    grad_gate, grad_up = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    for gate_c, up_c, slope_c, grad_gate_c, grad_up_c in _cached_chunks(gate, up, slope, grad_gate, grad_up):
        sigmoid = _gelu_sigmoid(gate_c, out=torch.empty_like(gate_c))
        steep = torch.mul(gate_c, gate_c).mul_(3 * GELU_CUBIC).add_(GELU_LINEAR).mul_(gate_c)
        torch.addcmul(sigmoid, sigmoid, sigmoid, value=-1, out=grad_gate_c)
        grad_gate_c.mul_(steep).add_(sigmoid).mul_(up_c).mul_(slope_c)
        torch.mul(gate_c, sigmoid, out=grad_up_c).mul_(slope_c)
    return grad_gate, grad_up


class Rotate(torch.autograd.Function):
    """Rotary embedding of ``[N, H, D]`` rows by ``[N, D]`` tables whose halves are equal (GPT-NeoX layout)."""

    @staticmethod
    def forward(ctx: Any, heads_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
        ctx.save_for_backward(cos_ND, sin_ND)
        return _rotated(heads_NHD, cos_ND, sin_ND, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_NHD: Tensor) -> tuple[Tensor, None, None]:
        cos_ND, sin_ND = ctx.saved_tensors
        return _rotated(slope_NHD, cos_ND, sin_ND, -1), None, None


def _rotated(heads_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor, direction: int) -> Tensor:
    half = heads_NHD.shape[-1] // 2
    sin_N1D = sin_ND[:, None]
    out_NHD = heads_NHD * cos_ND[:, None]
    out_NHD[..., :half].addcmul_(heads_NHD[..., half:], sin_N1D[..., :half], value=-direction)
    out_NHD[..., half:].addcmul_(heads_NHD[..., :half], sin_N1D[..., half:], value=direction)
    return out_NHD


def is_untouched(module: nn.Module, upstream: type[nn.Module]) -> bool:
    """Whether a module is exactly upstream's: same class, no forward of its own, no hooks."""
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return type(module) is upstream and "forward" not in module.__dict__ and not hooked


def fill_padded_actions(actions_BTA: Tensor, is_pad_BT: Tensor) -> Tensor:
    """Replace padded steps by the last step before them that exists (datasets repeat it anyway).

    The action tokens attend to each other, so what stands in a padded step matters to the others: this keeps them
    what they are in an unmasked run, and makes the loss independent of the values that the padding holds (NaN
    included). Steps before the first one take the first; a sample without any step becomes zeros.
    """
    steps_T = torch.arange(is_pad_BT.shape[1], device=is_pad_BT.device)
    last_BT = torch.where(is_pad_BT, -1, steps_T).cummax(dim=1).values
    first_B1 = (~is_pad_BT).to(torch.int8).argmax(dim=1, keepdim=True)
    source_BT = torch.where(last_BT < 0, first_B1, last_BT)
    filled_BTA = actions_BTA.gather(1, source_BT[..., None].expand_as(actions_BTA))
    empty_B = is_pad_BT.all(dim=1)
    return torch.where(empty_B[:, None, None], torch.zeros_like(filled_BTA), filled_BTA)


def reduce_all(losses_BFTA: Tensor, reduction: str) -> tuple[Tensor, dict[str, Any]]:
    """Upstream's reduction: the mean over everything, or over everything but the sample with ``none``."""
    logged: dict[str, Any] = {"loss_per_dim": losses_BFTA.detach().mean(dim=(0, 1, 2)).float().tolist()}
    loss = losses_BFTA.mean(dim=(1, 2, 3)) if reduction == "none" else losses_BFTA.mean()
    logged["loss"] = loss.mean().item()
    return loss, logged


def valid_elements(losses_BFTA: Tensor, is_pad_BT: Tensor | None, action_dims_B: Tensor | None) -> Tensor:
    """``[B, T, A]`` bool: elements that count.

    Args:
        is_pad_BT: steps that do not exist; None where padded steps count too.
        action_dims_B: leading action dimensions that each sample has; None for all.

    Raises:
        ValueError: a number of dimensions that is not between one and A.
    """
    batch_size, _, num_steps, num_dims = losses_BFTA.shape
    valid_BTA = torch.ones(batch_size, num_steps, num_dims, dtype=torch.bool, device=losses_BFTA.device)
    if is_pad_BT is not None:
        valid_BTA &= ~is_pad_BT[..., None]
    if action_dims_B is not None:
        if bool(((action_dims_B < 1) | (action_dims_B > num_dims)).any()):
            raise ValueError(
                f"action_dims counts the action dimensions of each sample, 1 to {num_dims} here; "
                f"got {action_dims_B.tolist()}."
            )
        valid_BTA &= torch.arange(num_dims, device=valid_BTA.device) < action_dims_B[:, None, None]
    return valid_BTA


def reduce_valid(
    losses_BFTA: Tensor,
    valid_BTA: Tensor,
    reduction: str,
    reduce_count: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, dict[str, Any]]:
    """Mean over the valid elements.

    The sum is divided by the count that ``reduce_count`` makes of the batch's own: the mean count over ranks of the
    whole step. DDP averages gradients over ranks and micro-batches add theirs up, so together they get total sum /
    total count. With ``none``, each sample is the mean over its own elements, and 0 where it has none.
    """
    valid_BFTA = valid_BTA[:, None].expand_as(losses_BFTA)
    kept_BFTA = torch.where(valid_BFTA, losses_BFTA, torch.zeros_like(losses_BFTA))
    counts_A = valid_BFTA.sum(dim=(0, 1, 2))
    per_dim_A = kept_BFTA.detach().sum(dim=(0, 1, 2)) / counts_A.clamp(min=1)
    logged: dict[str, Any] = {"loss_per_dim": per_dim_A.float().tolist()}
    if reduction == "none":
        per_sample = valid_BFTA.sum(dim=(1, 2, 3)).clamp(min=1)
        loss = kept_BFTA.sum(dim=(1, 2, 3)) / per_sample
        logged["loss"] = loss.mean().item()
        return loss, logged
    count = counts_A.sum().to(torch.float32)
    global_count = count if reduce_count is None else reduce_count(count)
    loss = kept_BFTA.sum() / global_count.clamp(min=torch.finfo(torch.float32).tiny)
    logged["loss"] = loss.item()
    return loss, logged
