# SPDX-License-Identifier: Apache-2.0
"""What reports say of FP8; they know no number format themselves. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Of a checkpoint with block-scaled weights, in `quantize.json` under `quantization.format`.
FORMAT: Mapping[str, Any] = {
    "name": "FP8",
    "title": "FP8 (e4m3, one scale for 128 × 128)",
    "sentence": "e4m3, one scale for 128 × 128 weights",
    "glossary": {
        "FP8, e4m3": "Floating point of 8 bits: a sign, 4 bits of exponent, 3 of mantissa. Rounding to it changes a "
        "value by one part in 16 at most, and by 2.6 % in the root mean square for ordinary weights.",
        "block scaling": "Each 128 × 128 weights share one float32 factor, so that the largest of them is the largest "
        "number of the format.",
    },
}
# Of training with FP8 matrix products, in a run's manifest under `precision.format`.
TRAINING_FORMAT: Mapping[str, Any] = {
    "name": "FP8",
    "glossary": {
        "FP8": "Matrix products of the language model with operands rounded to scaled 8-bit floating point; the "
        "weights that the optimizer changes stay in float32. It changes what is computed, so that losses differ from "
        "those of a variant without it by more than rounding in the policy's own precision.",
    },
}


def side_by_side_words(formats: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of the formats side by side, and the sentence under them.

    Args:
        formats: ``rows``, ``num_layers``, ``widest_range`` and ``blocks_matter`` of
            `embodix_fp8.format_table.formats_of_layers`.

    Returns:
        ``columns``, each with its ``key`` in a row, ``title``, ``small`` print and ``is_share``; and ``sentence``.
    """
    columns = [
        _column("weight_error", "error of the weight", f"mean over {formats['num_layers']} layers"),
        _column("worst_weight_error", "worst layer"),
        _column("product_error", "error of the product", "activations exact"),
        _column("product_error_fp8", "error of the product", "activations in e4m3, 1 × 128"),
        _column("zeroed", "lost weights", "became zero, worst layer"),
        _column("bytes_a_weight", "bytes a weight", is_share=False),
    ]
    return {"columns": columns, "sentence": formats_sentence(formats) if formats["rows"] else ""}


def _column(key: str, title: str, small: str = "", *, is_share: bool = True) -> dict[str, Any]:
    return {"key": key, "title": title, "small": small, "is_share": is_share}


def formats_sentence(formats: Mapping[str, Any]) -> str:
    """Whether blocks matter for these weights, and from when on they do."""
    rows = {row["format"]: row for row in formats["rows"]}
    tensor, block = rows["per-tensor"], rows["128x128"]
    matters = (
        "One scale a tensor loses noticeably more than blocks do in some layer: blocks matter here."
        if formats["blocks_matter"]
        else "Blocks make no difference to these weights: e4m3 is a floating-point format, and their range fits it."
    )
    return (
        f"{matters} The widest range of a weight, its largest value over its root mean square, is "
        f"{formats['widest_range']:.3g}; one scale a tensor gives a mean error of "
        f"{100 * tensor['weight_error']:.2f} %, blocks {100 * block['weight_error']:.2f} %. Blocks matter from a range "
        "of about 10 000 on, where one large weight pushes all others out of the format; then they confine the loss to "
        "its block."
    )
