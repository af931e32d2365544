# SPDX-License-Identifier: Apache-2.0
"""Writing the weights of a quantized model folder, one tensor in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from embodix_fp8.blocks import (
    FLOAT8,
    ScaledWeight,
    dequantize_blocks,
    quantize_blocks,
    rows_at_a_time,
    scale_shape,
)
from embodix_fp8.file_format import (
    CONFIG_KEY,
    DROPPED_KEY,
    SCALE,
    WEIGHT,
    BlockConfig,
    dropped_text,
    metadata_text,
)
from embodix_fp8.tensor_file import WEIGHTS_FILE, TensorFiles, TensorFileWriter, TensorSpec


@dataclass(frozen=True)
class ConversionPlan:
    """What becomes of the tensors of a model.

    Attributes:
        names: name in the quantized file -> name in the source; a dropped tensor's included.
        convert: module path -> the dtype in which the policy holds its weight, which is what gets quantized: so that
            the file equals what quantizing the loaded policy gives.
        drop: names that are left out.
        rest_dtype: of the other floating-point tensors; None keeps the source's.
        config: written into the file's header.
    """

    names: Mapping[str, str]
    convert: Mapping[str, torch.dtype]
    drop: Collection[str]
    rest_dtype: torch.dtype | None
    config: BlockConfig


def written_specs(source: Mapping[str, TensorSpec], plan: ConversionPlan) -> dict[str, TensorSpec]:
    """Every tensor of the file to be written; ``source`` has the names of the source."""
    specs = {}
    for name, source_name in plan.names.items():
        spec, module = source[source_name], name.removesuffix(WEIGHT)
        if name in plan.drop:
            continue
        if _is_converted(name, plan):
            specs[name] = TensorSpec(FLOAT8, spec.shape)
            specs[module + SCALE] = TensorSpec(torch.float32, scale_shape(spec.shape, plan.config.block))
        else:
            specs[name] = TensorSpec(_rest_dtype(spec.dtype, plan), spec.shape)
    return specs


def write_weights(
    source: TensorFiles,
    plan: ConversionPlan,
    folder: Path,
    on_converted: Callable[[str, Tensor, ScaledWeight], None] = lambda *_: None,
) -> None:
    """Write ``model.safetensors`` and its digests into a folder.

    Args:
        source: the model's tensors.
        plan: what becomes of them.
        folder: where nothing else reads yet.
        on_converted: called with the path, the weight and its quantized form of every converted module.

    Raises:
        ValueError: a weight that is not finite; the message names it.
        OSError: the disk is full, or the folder can't be written.
    """
    dropped = {name: source.specs[plan.names[name]] for name in plan.drop}
    metadata = {"format": "pt", CONFIG_KEY: metadata_text(plan.config.to_json()), DROPPED_KEY: dropped_text(dropped)}
    specs = written_specs(source.specs, plan)
    with TensorFileWriter(folder / WEIGHTS_FILE, specs, metadata) as writer:
        for name, source_name in plan.names.items():
            if name in plan.drop:
                continue
            tensor = source.tensor(source_name)
            if not _is_converted(name, plan):
                writer.write(name, tensor.to(specs[name].dtype))
                continue
            module = name.removesuffix(WEIGHT)
            weight = tensor.to(plan.convert[module])
            scaled = _quantize(name, weight, plan.config.block)
            writer.write(name, scaled.values)
            writer.write(module + SCALE, scaled.scale_inv)
            on_converted(module, weight, scaled)


def modules_left_out(skipped: Iterable[str], converted: Collection[str]) -> tuple[str, ...]:
    """The shortest beginnings of module paths that name every skipped module and no converted one.

    Raises:
        ValueError: a skipped module whose name can't be told from a converted one's.
    """
    beginnings: dict[str, None] = {}
    for path in skipped:
        parts = path.split(".")
        candidates = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        free = (
            name for name in candidates if not BlockConfig(modules_to_not_convert=(name,)).leaves_out_any(converted)
        )
        beginning = next(free, None)
        if beginning is None:
            raise ValueError(f"Module {path} is to stay as it is, but its name is the beginning of a converted one's.")
        beginnings[beginning] = None
    return tuple(beginnings)


def sqnr_of_weight_db(weight: Tensor, scaled: ScaledWeight) -> float:
    """``accuracy.sqnr_db`` of a quantized weight, summed over some rows at a time; infinite where nothing changed."""
    num_rows, block = rows_at_a_time(weight, scaled.block), scaled.block
    signal = noise = 0.0
    for first in range(0, weight.shape[0], num_rows):
        values, first_block = scaled.values[first : first + num_rows], first // block[0]
        scales = scaled.scale_inv[first_block : first_block + num_rows // block[0]]
        rows = weight[first : first + num_rows].double()
        signal += float(rows.square().sum())
        noise += float((rows - dequantize_blocks(values, scales, block, torch.float32).double()).square().sum())
    return 10 * math.log10(signal / noise) if noise > 0 else math.inf


def _is_converted(name: str, plan: ConversionPlan) -> bool:
    return name.endswith(WEIGHT) and name.removesuffix(WEIGHT) in plan.convert


def _rest_dtype(dtype: torch.dtype, plan: ConversionPlan) -> torch.dtype:
    return plan.rest_dtype if plan.rest_dtype is not None and dtype.is_floating_point else dtype


def _quantize(name: str, weight: Tensor, block: tuple[int, int]) -> ScaledWeight:
    try:
        return quantize_blocks(weight, block)
    except ValueError as error:
        raise ValueError(f"Tensor {name} can't be quantized: {error}") from error
