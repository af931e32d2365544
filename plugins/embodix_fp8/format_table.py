# SPDX-License-Identifier: Apache-2.0
"""FP8 formats side by side on a policy's own weights and activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from embodix.quantization.accuracy_probe import LayerTensors
from embodix_fp8.format_words import side_by_side_words
from embodix_fp8.side_by_side import MATTERS_FROM, FormatError, compare_formats

MAX_ROWS = 64  # of activations, a layer


def formats_of_layers(weights: Mapping[str, Tensor], layers: Mapping[str, LayerTensors]) -> dict[str, Any]:
    """Each format over all layers that are multiplied, as plain containers.

    Args:
        weights: module path -> unquantized weight.
        layers: what the unquantized policy computed.

    Returns:
        ``rows``, one a format with means over the layers and the worst layer; ``widest_range``, the largest magnitude
        over the root mean square of a weight; ``blocks_matter``, whether one scale a tensor is noticeably worse than
        blocks in some layer; with the words of `side_by_side_words`.
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
