# SPDX-License-Identifier: Apache-2.0
"""e4m3 values with one fp32 scale a block of a weight: the layout of fine-grained FP8 checkpoints.

The scale of a block is its largest magnitude divided by 448, the largest e4m3 value (DeepSeek-V3, arXiv:2412.19437,
section 3.3.2). A block of the whole weight is per-tensor scaling, one of ``(1, columns)`` per-row, one of ``(1, 128)``
the scaling of activations.

Shape suffixes: N rows (outputs), K columns (inputs), R row blocks, C column blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from embodix.checkpoints.quantized_weights import WEIGHT

FLOAT8 = torch.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK = (128, 128)
ACTIVATION_BLOCK = (1, 128)
SCALE = ".weight_scale_inv"  # what the name of the scales adds to the module's path
# Below it a scale would lose digits: blocks that small are scaled as if their largest magnitude were 448 times this.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
NUM_WEIGHTS_AT_A_TIME = 2**24  # so that a vocabulary takes no multiple of its memory


@dataclass(frozen=True)
class ScaledWeight:
    """What a file holds of one weight.

    Attributes:
        values: float8_e4m3fn ``[N, K]``.
        scale_inv: float32 ``[ceil(N / rows), ceil(K / columns)]``. Despite its name, which is that of the file format,
            it is the multiplier: ``weight = values * scale_inv``.
        block: rows and columns that share a scale; blocks at the lower and right edge may be smaller.
    """

    values: Tensor
    scale_inv: Tensor
    block: tuple[int, int]

    def __post_init__(self) -> None:
        shape = scale_shape(tuple(self.values.shape), self.block)
        if self.values.dtype != FLOAT8 or self.scale_inv.dtype != torch.float32:
            raise ValueError(
                f"A scaled weight has values in {FLOAT8} and scales in torch.float32; got {self.values.dtype} and "
                f"{self.scale_inv.dtype}."
            )
        if tuple(self.scale_inv.shape) != shape:
            raise ValueError(
                f"A weight of shape {tuple(self.values.shape)} in blocks of {self.block} has scales of shape {shape}; "
                f"got {tuple(self.scale_inv.shape)}."
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scale_inv.nbytes

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """``[N, K]``: the product with the scales in float32, then rounded to ``dtype``."""
        return dequantize_blocks(self.values, self.scale_inv, self.block, dtype)

    def tensors(self) -> dict[str, Tensor]:
        """As the file holds them, by what their names add to the module's path."""
        return {WEIGHT: self.values, SCALE: self.scale_inv}

    def sqnr_db(self, weight_NK: Tensor) -> float:
        """``accuracy.sqnr_db`` against the unquantized weight, summed over some rows at a time."""
        num_rows = rows_at_a_time(weight_NK, self.block)
        signal = noise = 0.0
        for first in range(0, weight_NK.shape[0], num_rows):
            values_NK, first_block = self.values[first : first + num_rows], first // self.block[0]
            scale_RC = self.scale_inv[first_block : first_block + num_rows // self.block[0]]
            rows_NK = weight_NK[first : first + num_rows].double()
            got_NK = dequantize_blocks(values_NK, scale_RC, self.block, torch.float32).double()
            signal += float(rows_NK.square().sum())
            noise += float((rows_NK - got_NK).square().sum())
        return 10 * math.log10(signal / noise) if noise > 0 else math.inf


def quantize_blocks(weight_NK: Tensor, block: tuple[int, int] = BLOCK) -> ScaledWeight:
    """Round a weight to e4m3 with one scale a block, to nearest even.

    Blocks at the edges take the largest magnitude of what exists; a block of zeros has scale 1.

    Raises:
        ValueError: not a matrix of floating point, a block below 1 x 1, or values that are not finite.
    """
    _require_matrix(weight_NK, block)
    parts = [_quantize_rows(rows, block) for rows in weight_NK.detach().split(rows_at_a_time(weight_NK, block))]
    if len(parts) == 1:
        return parts[0]
    values_NK, scale_RC = (torch.cat([getattr(part, name) for part in parts]) for name in ("values", "scale_inv"))
    return ScaledWeight(values_NK, scale_RC, block)


def _quantize_rows(weight_NK: Tensor, block: tuple[int, int]) -> ScaledWeight:
    wide_NK = weight_NK.float()
    amax_RC = block_amax(wide_NK, block)
    if amax_RC.device.type != "meta" and not bool(torch.isfinite(amax_RC).all()):
        raise ValueError("Only finite values can be quantized; got NaN or infinity. Is the checkpoint damaged?")
    return round_blocks(wide_NK, amax_RC, block)


def round_blocks(wide_NK: Tensor, amax_RC: Tensor, block: tuple[int, int]) -> ScaledWeight:
    """``quantize_blocks`` of checked float32 values whose ``block_amax`` is known; what is not finite becomes NaN."""
    scale_RC = torch.where(amax_RC > 0, (amax_RC / E4M3_MAX).clamp(min=SMALLEST_SCALE), torch.ones_like(amax_RC))
    values_NK = _with_scales(torch.div, wide_NK, scale_RC, block).to(FLOAT8)
    return ScaledWeight(values_NK, scale_RC, block)


def dequantize_blocks(values_NK: Tensor, scale_RC: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """``[N, K]``: values times scales in float32, rounded to ``dtype``."""
    return _with_scales(torch.mul, values_NK.float(), scale_RC, block).to(dtype)


def block_amax(wide_NK: Tensor, block: tuple[int, int]) -> Tensor:
    """``[R, C]``: the largest magnitude of every block; NaN where it has one."""
    rows, columns = _clipped(block, wide_NK)
    padding = (-wide_NK.shape[1] % columns, -wide_NK.shape[0] % rows)
    padded_NK = F.pad(wide_NK, (0, padding[0], 0, padding[1])) if any(padding) else wide_NK
    return _as_blocks(padded_NK, rows, columns).abs().amax(dim=(1, 3))


def _with_scales(
    operation: Callable[[Tensor, Tensor], Tensor], wide_NK: Tensor, scale_RC: Tensor, block: tuple[int, int]
) -> Tensor:
    """A product with, or quotient by, the scale of each element's block."""
    rows, columns = _clipped(block, wide_NK)
    if wide_NK.shape[0] % rows or wide_NK.shape[1] % columns:
        scale_NK = scale_RC.repeat_interleave(rows, dim=0)[: wide_NK.shape[0]]
        scale_NK = scale_NK.repeat_interleave(columns, dim=1)[:, : wide_NK.shape[1]]
        return operation(wide_NK, scale_NK)
    return operation(_as_blocks(wide_NK, rows, columns), scale_RC[:, None, :, None]).view(wide_NK.shape)


def _as_blocks(matrix_NK: Tensor, rows: int, columns: int) -> Tensor:
    """``[R, rows, C, columns]``."""
    return matrix_NK.reshape(matrix_NK.shape[0] // rows, rows, matrix_NK.shape[1] // columns, columns)


def rows_at_a_time(weight_NK: Tensor, block: tuple[int, int]) -> int:
    """Rows of whole blocks with about ``NUM_WEIGHTS_AT_A_TIME`` weights."""
    return block[0] * max(1, NUM_WEIGHTS_AT_A_TIME // (block[0] * weight_NK.shape[1]))


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a weight."""
    rows, columns = shape
    return math.ceil(rows / block[0]), math.ceil(columns / block[1])


def _clipped(block: tuple[int, int], matrix_NK: Tensor) -> tuple[int, int]:
    """A block that is no larger than the matrix, which may have no rows."""
    return min(block[0], max(1, matrix_NK.shape[0])), min(block[1], matrix_NK.shape[1])


def _require_matrix(weight: Tensor, block: tuple[int, int]) -> None:
    if weight.dim() != 2 or not weight.numel() or not weight.is_floating_point():
        found = f"{weight.dtype} {tuple(weight.shape)}"
        raise ValueError(f"Weights are quantized as matrices of floating point; got {found}.")
    if len(block) != 2 or min(block) < 1:
        raise ValueError(f"A block has at least 1 row and 1 column; got {block}.")
