# SPDX-License-Identifier: Apache-2.0
"""FP8 formats on the same weights: what one scale a tensor, a row or a block costs in accuracy and in bytes.

e4m3 is a floating-point format: inside its range (a factor of about 2 ** 15 from the largest value to the smallest that
keeps its digits) a scale shared by more weights costs nothing. Blocks matter where a few weights are so much larger
than the rest that the rest falls out of that range.

Shape suffixes: M rows of activations, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from embodix.quantization.accuracy import relative_error, sqnr_db
from embodix.quantization.accuracy_probe import LayerTensors
from embodix_fp8.blocks import BLOCK, ScaledWeight, quantize_blocks
from embodix_fp8.format_words import side_by_side_words
from embodix_fp8.kernels import quantize_rows

FormatName = Literal["per-tensor", "per-row", "128x128"]
FORMATS: tuple[FormatName, ...] = ("per-tensor", "per-row", "128x128")
OutlierPattern = Literal["none", "one weight", "one column"]

# Blocks matter where one scale a tensor makes the error of the other weights this many times that of blocks.
MATTERS_FROM = 1.2
MAX_ROWS = 64  # of activations, a layer


@dataclass(frozen=True)
class FormatError:
    """One format on one weight.

    Attributes:
        format: scales of the weight: one a tensor, a row or a block of 128 x 128.
        weight_error: relative error of the weights that are no outliers.
        weight_sqnr_db: the same in decibels.
        zeroed: share of them that became zero.
        product_error: relative error of a product's part that those weights compute, activations in high precision.
        product_error_fp8: the same with activations in e4m3, one scale for 128 channels of a row.
        bytes_a_weight: values and scales.
    """

    format: FormatName
    weight_error: float
    weight_sqnr_db: float
    zeroed: float
    product_error: float
    product_error_fp8: float
    bytes_a_weight: float


def quantize_in(weight_NK: Tensor, format: FormatName) -> ScaledWeight:
    """A weight in one of the formats."""
    blocks = {"per-tensor": tuple(weight_NK.shape), "per-row": (1, weight_NK.shape[1]), "128x128": BLOCK}
    rows, columns = blocks[format]
    return quantize_blocks(weight_NK, (rows, columns))


def compare_formats(weight_NK: Tensor, rows_MK: Tensor, outliers_NK: Tensor | None = None) -> list[FormatError]:
    """Every format on one weight.

    Args:
        weight_NK: the weight.
        rows_MK: activations that it multiplies.
        outliers_NK: which weights are outliers: what they do to the others is measured, not their own error; None for
            no weight.
    """
    others_NK = torch.ones_like(weight_NK, dtype=torch.bool) if outliers_NK is None else ~outliers_NK
    return [_error(weight_NK.float(), rows_MK.float(), others_NK, name) for name in FORMATS]


def _error(weight_NK: Tensor, rows_MK: Tensor, others_NK: Tensor, format: FormatName) -> FormatError:
    scaled = quantize_in(weight_NK, format)
    got_NK = scaled.dequantize(torch.float32)
    others, got = weight_NK[others_NK], got_NK[others_NK]
    wanted_MN = rows_MK @ (weight_NK * others_NK).t()
    kept_KN = (got_NK * others_NK).t()
    return FormatError(
        format,
        weight_error=relative_error(others, got),
        weight_sqnr_db=sqnr_db(others, got),
        zeroed=float(((got == 0) & (others != 0)).float().mean()),
        product_error=relative_error(wanted_MN, rows_MK @ kept_KN),
        product_error_fp8=relative_error(wanted_MN, quantize_rows(rows_MK).dequantize(torch.float32) @ kept_KN),
        bytes_a_weight=scaled.num_bytes / weight_NK.numel(),
    )


def weights_of_range(
    shape: tuple[int, int], amax_over_sigma: float, pattern: OutlierPattern, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Normal weights, a few of which are ``amax_over_sigma`` standard deviations; and which those are, ``[N, K]``.

    ``one weight`` is the mildest case, ``one column`` an input channel that every row has: one scale a row does not
    confine it, blocks do.
    """
    weight_NK = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    outliers_NK = torch.zeros(shape, dtype=torch.bool)
    if pattern == "one weight":
        outliers_NK[0, 0] = True
    elif pattern == "one column":
        outliers_NK[:, 0] = True
    weight_NK[outliers_NK] = amax_over_sigma
    return weight_NK, outliers_NK


def blocks_matter(errors: Sequence[FormatError]) -> bool:
    """Whether one scale a tensor loses what blocks keep."""
    by_format = {error.format: error.weight_error for error in errors}
    return by_format["per-tensor"] > MATTERS_FROM * by_format["128x128"]


def formats_of_layers(weights: Mapping[str, Tensor], layers: Mapping[str, LayerTensors]) -> dict[str, Any]:
    """Each format over all layers that are multiplied, as plain containers.

    Args:
        weights: module path -> unquantized weight.
        layers: what the unquantized policy computed.

    Returns:
        ``rows``, one a format with means over the layers and the worst layer; ``widest_range``, the largest magnitude
        over the root mean square of a weight; ``blocks_matter``, whether one scale a tensor is noticeably worse than
        blocks in some layer; with the words of ``side_by_side_words``.
    """
    multiplied = [path for path in weights if path in layers and layers[path].inputs]
    errors = {path: _errors(weights[path], layers[path]) for path in multiplied}
    formats = zip(*errors.values(), strict=True)
    ratios = [of_layer[0].weight_error / of_layer[-1].weight_error for of_layer in errors.values()]
    found = {
        "rows": [_row(list(of_format), multiplied) for of_format in formats],
        "num_layers": len(multiplied),
        "widest_range": max((_range(weights[path]) for path in multiplied), default=0.0),
        "blocks_matter": max(ratios, default=0.0) > MATTERS_FROM,
    }
    return {**found, **side_by_side_words(found)}


def _errors(weight: Tensor, layer: LayerTensors) -> list[FormatError]:
    rows = torch.cat(layer.inputs)
    kept = rows[torch.linspace(0, len(rows) - 1, min(MAX_ROWS, len(rows))).long()]
    return compare_formats(weight.detach().float().cpu(), kept)


def _row(errors: list[FormatError], paths: list[str]) -> dict[str, Any]:
    def mean(name: str) -> float:
        return float(sum(getattr(error, name) for error in errors) / len(errors))

    worst = max(range(len(errors)), key=lambda index: errors[index].weight_error)
    return {
        "format": errors[0].format,
        "weight_error": mean("weight_error"),
        "worst_weight_error": errors[worst].weight_error,
        "worst_path": paths[worst],
        "product_error": mean("product_error"),
        "product_error_fp8": mean("product_error_fp8"),
        "zeroed": max(error.zeroed for error in errors),
        "bytes_a_weight": mean("bytes_a_weight"),
    }


def _range(weight: Tensor) -> float:
    wide = weight.detach().float()
    return float(wide.abs().max() / wide.square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny))
