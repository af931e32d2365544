# SPDX-License-Identifier: Apache-2.0
"""A weight of a linear layer or an embedding that is held in FP8 and looks like one of the policy's own dtype.

Modules stay ``nn.Linear`` and ``nn.Embedding``; whoever asks for ``weight.dtype`` gets the dtype that the policy
computes in. Only what a policy does with such weights is defined: products, look-ups, moving, copying. Anything else
raises, instead of quietly computing on a dequantized copy.

Shape suffixes: M rows of activations, N outputs or tokens, K inputs or channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from embodix_fp8.blocks import FLOAT8, ScaledWeight, quantize_blocks
from embodix_fp8.kernels import KERNELS

aten = torch.ops.aten
COMPUTE_DTYPES = (torch.float32, torch.bfloat16)


class BlockScaledWeight(torch.Tensor):
    """``[N, K]`` in ``dtype`` for the outside, e4m3 with block scales inside; it has no gradient.

    Args:
        scaled: values and scales.
        dtype: what it is multiplied in.
        kernel: a name of ``embodix_fp8.kernels.KERNELS``.
    """

    scaled: ScaledWeight
    kernel: str

    @staticmethod
    def __new__(cls, scaled: ScaledWeight, dtype: torch.dtype, kernel: str) -> BlockScaledWeight:
        require_compute_dtype(dtype)
        weight: BlockScaledWeight = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, scaled.values.shape, dtype=dtype, device=scaled.values.device, requires_grad=False
        )
        weight.scaled, weight.kernel = scaled, kernel
        return weight

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        block = "x".join(map(str, self.scaled.block))
        return f"BlockScaledWeight({tuple(self.shape)}, {self.dtype}, blocks of {block}, kernel={self.kernel!r})"

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """An ordinary tensor of the weight's dtype, or of another."""
        return self.scaled.dequantize(dtype or self.dtype)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes held: values and scales."""
        return self.scaled.num_bytes

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:  # type: ignore[override]
        """
        Raises:
            ValueError: a gradient is asked for.
        """
        if requires_grad:
            raise ValueError("FP8 weights have no gradient. Uninstall the quantization to train; precision=fp8 trains.")
        return super().requires_grad_(False)

    def storage(self) -> Any:
        """
        Raises:
            RuntimeError: there is no one storage; safetensors, for one, asks for it.
        """
        raise RuntimeError(
            "A weight in block-scaled FP8 has no storage of its own, so upstream can't save it. `lerobot quantize` "
            "writes quantized checkpoints; uninstall the quantization to save the policy as it was."
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["e4m3", "scale_inv"], (self.scaled.block, self.dtype, self.kernel)

    @property
    def e4m3(self) -> Tensor:
        """The values."""
        return self.scaled.values

    @property
    def scale_inv(self) -> Tensor:
        """The scales."""
        return self.scaled.scale_inv

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, Tensor], meta: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> BlockScaledWeight:
        block, dtype, kernel = meta
        return cls(ScaledWeight(inner["e4m3"], inner["scale_inv"], block), dtype, kernel)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            copied = self.clone()
            memo[id(self)] = torch.nn.Parameter(copied, False) if isinstance(self, torch.nn.Parameter) else copied
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.scaled, self.dtype, self.kernel, isinstance(self, torch.nn.Parameter))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in FUNCTIONS:
            return FUNCTIONS[func](*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        operation = OPERATIONS.get(func)
        if operation is None:
            raise NotImplementedError(
                f"A weight in block-scaled FP8 is multiplied, looked up, moved and copied; got {func}. Take "
                "weight.dequantize() for anything else, or uninstall the quantization first (`lerobot quantize` "
                "writes quantized checkpoints)."
            )
        return operation(*args, **(kwargs or {}))


def require_compute_dtype(dtype: torch.dtype) -> None:
    """
    Raises:
        ValueError: float16, whose range action errors grow out of, or no floating point.
    """
    if dtype not in COMPUTE_DTYPES:
        raise ValueError(
            f"FP8 weights are multiplied in {' or '.join(map(str, COMPUTE_DTYPES))}; got {dtype}. Load the policy in "
            "bfloat16 or float32."
        )


class FrozenProduct(torch.autograd.Function):
    """``rows @ weight.T`` by a kernel; the gradient of the rows is that of the dequantized weight.

    Rounding of activations has gradient one (straight-through). Only the FP8 values are kept for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, rows_MK: Tensor, values: Tensor, scale_inv: Tensor, block: Any, kernel: str) -> Tensor:
        ctx.save_for_backward(values, scale_inv)
        ctx.block = block
        return KERNELS[kernel](rows_MK, ScaledWeight(values, scale_inv, block))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_MN: Tensor) -> tuple[Tensor, None, None, None, None]:
        values, scale_inv = ctx.saved_tensors
        weight = ScaledWeight(values, scale_inv, ctx.block)
        return slope_MN @ weight.dequantize(slope_MN.dtype), None, None, None, None


def _linear(input: Tensor, weight: BlockScaledWeight, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``, in autocast's dtype where that is on."""
    device, dtype = input.device.type, weight.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        input = input.to(dtype)
    require_compute_dtype(dtype)
    if input.dtype != dtype:
        raise ValueError(f"Activations have the weight's dtype {dtype}; got {input.dtype}.")
    scaled = weight.scaled
    with torch.autocast(device, enabled=False):
        rows = FrozenProduct.apply(
            input.reshape(-1, input.shape[-1]), scaled.values, scaled.scale_inv, scaled.block, weight.kernel
        )
        output: Tensor = rows.view(*input.shape[:-1], scaled.values.shape[0])
        return output if bias is None else output + bias.to(dtype)


def _embedding(input: Tensor, weight: BlockScaledWeight, *args: Any, **kwargs: Any) -> Tensor:
    """``torch.nn.functional.embedding``: only the rows that are looked up are dequantized."""
    max_norm = kwargs.get("max_norm", args[1] if len(args) > 1 else None)
    if max_norm is not None:
        raise ValueError("An embedding with max_norm rewrites its weight, so it can't be held in FP8.")
    rows_per_scale, channels = weight.scaled.block
    tokens = input.reshape(-1)
    values_MK = weight.scaled.values.view(torch.uint8)[tokens].view(FLOAT8)
    scales = ScaledWeight(values_MK, weight.scaled.scale_inv[tokens // rows_per_scale], (1, channels))
    return scales.dequantize(weight.dtype).view(*input.shape, weight.shape[1])


def _map(weight: BlockScaledWeight, change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> BlockScaledWeight:
    scaled = ScaledWeight(change(weight.scaled.values), change(weight.scaled.scale_inv), weight.scaled.block)
    return BlockScaledWeight(scaled, dtype, weight.kernel)


def _alias(weight: BlockScaledWeight) -> BlockScaledWeight:
    return _map(weight, lambda part: part.detach(), weight.dtype)


def _clone(weight: BlockScaledWeight, *, memory_format: Any = None) -> BlockScaledWeight:
    return _map(weight, lambda part: part.clone(), weight.dtype)


def _to_copy(weight: BlockScaledWeight, **options: Any) -> BlockScaledWeight:
    """Another device moves it, another dtype is what it is multiplied in; the values stay."""
    dtype = options.get("dtype") or weight.dtype
    device, non_blocking = options.get("device") or weight.device, options.get("non_blocking", False)
    return _map(weight, lambda part: part.to(device, non_blocking=non_blocking, copy=True), dtype)


def _copy(weight: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Written into, it is quantized anew; from another such weight values and scales are taken as they are."""
    if not isinstance(weight, BlockScaledWeight):
        assert isinstance(source, BlockScaledWeight)
        return weight.copy_(source.dequantize(weight.dtype), non_blocking)
    if isinstance(source, BlockScaledWeight) and source.scaled.block == weight.scaled.block:
        scaled = source.scaled
    else:
        dense = source.dequantize() if isinstance(source, BlockScaledWeight) else source
        scaled = quantize_blocks(dense, weight.scaled.block)
    weight.scaled.values.copy_(scaled.values, non_blocking)
    weight.scaled.scale_inv.copy_(scaled.scale_inv, non_blocking)
    return weight


def _rebuild(scaled: ScaledWeight, dtype: torch.dtype, kernel: str, is_parameter: bool) -> Tensor:
    weight = BlockScaledWeight(scaled, dtype, kernel)
    return torch.nn.Parameter(weight, requires_grad=False) if is_parameter else weight


FUNCTIONS: dict[Any, Callable[..., Any]] = {F.linear: _linear, F.embedding: _embedding}
OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
}
