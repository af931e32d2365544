# SPDX-License-Identifier: Apache-2.0
"""A model folder with block-scaled FP8 weights: its layout, and reading it with everything checked.

The layout is that of transformers' fine-grained FP8 (transformers/integrations/finegrained_fp8.py: ``FP8Linear``) and
of vLLM's block mode (vllm/model_executor/layers/quantization/fp8.py): ``X.weight`` in float8_e4m3fn ``[N, K]``,
``X.weight_scale_inv`` in float32 ``[ceil(N / 128), ceil(K / 128)]`` (the multiplier, despite its name), and
``quantization_config`` in ``config.json``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from embodix.checkpoints.quantized_weights import WEIGHT, QuantizedWeights
from embodix.policies.quantizers import CONFIG_FILE, CONFIG_KEY, quantization_config
from embodix.tensor_file import DTYPE_NAMES, WEIGHTS_FILE, FileFormatError, TensorSpec, read_header
from embodix_fp8.blocks import BLOCK, FLOAT8, SCALE, ScaledWeight, quantize_blocks, scale_shape

METHOD = "fp8"
NAN_CODE = 0x7F  # e4m3fn has two codes for NaN, this one with either sign, and none for infinity


@dataclass(frozen=True)
class BlockConfig:
    """``quantization_config`` of a folder, and what it means for a file.

    Attributes:
        block: rows and columns that share a scale.
        modules_to_not_convert: beginnings or ends of the names of modules in high precision.
    """

    block: tuple[int, int] = BLOCK
    modules_to_not_convert: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As transformers and vLLM read it."""
        return {
            "quant_method": METHOD,
            "activation_scheme": "dynamic",
            "weight_block_size": list(self.block),
            "modules_to_not_convert": list(self.modules_to_not_convert),
        }

    @classmethod
    def from_json(cls, fields: Any, place: str) -> Self:
        """
        Raises:
            FileFormatError: another method than block-scaled FP8 with dynamic activations.
        """
        method, scheme = _field(fields, "quant_method", place), _field(fields, "activation_scheme", place)
        block = _field(fields, "weight_block_size", place)
        if method != METHOD or scheme != "dynamic":
            raise FileFormatError(
                f"{place} must say quant_method fp8 and activation_scheme dynamic; got {method!r} and {scheme!r}."
            )
        if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
            raise FileFormatError(f"{place} must give weight_block_size as two whole numbers; got {block!r}.")
        return cls((block[0], block[1]), tuple(fields.get("modules_to_not_convert") or ()))

    def describe(self) -> dict[str, Any]:
        """For the record of ``lerobot quantize``."""
        return {"block": list(self.block)}

    def specs(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """Values and scales of a weight."""
        scales = TensorSpec(torch.float32, scale_shape(shape, self.block))
        return {WEIGHT: TensorSpec(FLOAT8, shape), SCALE: scales}

    def quantize(self, weight: Tensor) -> ScaledWeight:
        """``quantize_blocks``."""
        return quantize_blocks(weight, self.block)

    def leaves_out(self, module: str) -> bool:
        """Whether the module's name begins or ends with one of those in high precision, as transformers matches."""
        return any(module.startswith(name) or module.endswith(name) for name in self.modules_to_not_convert)


def _field(fields: Any, name: str, place: str) -> Any:
    if not isinstance(fields, Mapping) or name not in fields:
        raise FileFormatError(f"{place} must be a mapping with {name}; got {fields!r}.")
    return fields[name]


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
            name
            for name in candidates
            if not any(map(BlockConfig(modules_to_not_convert=(name,)).leaves_out, converted))
        )
        beginning = next(free, None)
        if beginning is None:
            raise ValueError(f"Module {path} is to stay as it is, but its name is the beginning of a converted one's.")
        beginnings[beginning] = None
    return tuple(beginnings)


def is_quantized(folder: Path) -> bool:
    """Whether a model folder holds block-scaled FP8 weights: its config says so, or its file has their scales."""
    fields, weights = quantization_config(folder), folder / WEIGHTS_FILE
    if isinstance(fields, Mapping) and fields.get("quant_method") == METHOD:
        return True
    return weights.is_file() and any(name.endswith(SCALE) for name in read_header(weights).specs)


class BlockScaledWeights(QuantizedWeights[BlockConfig, ScaledWeight]):
    """The weights of a model folder in block-scaled FP8.

    Raises:
        FileFormatError: as ``QuantizedWeights``; also FP8 values without scales or the reverse, and wrong dtypes or
            shapes.
    """

    def parse_layout(self, fields: Any, place: str) -> BlockConfig:
        return BlockConfig.from_json(fields, place)

    @property
    def summary(self) -> str:
        rows, columns = self.layout.block
        return f"{len(self.modules)} weights in FP8 (e4m3, one scale for {rows} x {columns})"

    def stored_weight(self, module: str) -> ScaledWeight:
        values, scale_inv = self.tensor(module + WEIGHT), self.tensor(module + SCALE)
        if bool(((values.view(torch.uint8) & NAN_CODE) == NAN_CODE).any()):
            raise FileFormatError(f"Tensor {module}{WEIGHT} of {self.folder} holds values that are not finite.")
        if not bool((torch.isfinite(scale_inv) & (scale_inv >= 0)).all()):
            raise FileFormatError(
                f"Tensor {module}{SCALE} of {self.folder} holds scales that are negative or not finite."
            )
        return ScaledWeight(values, scale_inv, self.layout.block)

    def quantized_modules(self) -> dict[str, TensorSpec]:
        values = {name: spec for name, spec in self.specs.items() if spec.dtype == FLOAT8}
        misnamed = [name for name in values if not name.endswith(WEIGHT)]
        if misnamed:
            raise FileFormatError(
                f"Tensor {misnamed[0]} of {self.folder} is in FP8; only names that end in {WEIGHT} may be."
            )
        modules = dict(sorted({name.removesuffix(WEIGHT): spec for name, spec in values.items()}.items()))
        self._require_values(modules)
        for module, spec in modules.items():
            self._require_fitting(module, spec)
        return modules

    def _require_values(self, modules: Collection[str]) -> None:
        """Every scale needs the values that it scales."""
        for name in self.specs:
            if name.endswith(SCALE) and name.removesuffix(SCALE) not in modules:
                weight = self.specs.get(name.removesuffix(SCALE) + WEIGHT)
                found = "is missing" if weight is None else f"is {DTYPE_NAMES[weight.dtype]}"
                raise FileFormatError(
                    f"Tensor {name} of {self.folder} scales FP8 values, but {name.removesuffix(SCALE)}{WEIGHT} {found}."
                )
        if not modules:
            raise FileFormatError(f"{self.folder / CONFIG_FILE} has a {CONFIG_KEY}, but no tensor is in FP8.")

    def _require_fitting(self, module: str, spec: TensorSpec) -> None:
        scale = self.specs.get(module + SCALE)
        if scale is None:
            raise FileFormatError(f"Tensor {module}{WEIGHT} of {self.folder} is in FP8 and has no {module}{SCALE}.")
        if len(spec.shape) != 2:
            raise FileFormatError(f"Tensor {module}{WEIGHT} of {self.folder} must be a matrix; got {spec.shape}.")
        wanted = self.layout.specs(spec.shape)[SCALE]
        if scale != wanted:
            raise FileFormatError(
                f"Tensor {module}{SCALE} of {self.folder} must be F32 {wanted.shape} for a weight of {spec.shape} in "
                f"blocks of {self.layout.block}; got {DTYPE_NAMES[scale.dtype]} {scale.shape}."
            )
        if self.layout.leaves_out(module):
            raise FileFormatError(
                f"{self.folder / CONFIG_FILE} says that {module} is not quantized (modules_to_not_convert), but tensor "
                f"{module}{WEIGHT} is in FP8."
            )
