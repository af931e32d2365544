# SPDX-License-Identifier: Apache-2.0
"""A third party's quantizer: int8 with one scale a row, dequantized when it is installed, and its files.

Shape suffixes: N rows (outputs), K columns (inputs).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodix.checkpoints.quantized_weights import WEIGHT, QuantizedWeights
from embodix.contracts import FormatWords
from embodix.hookspecs import Registration, hookimpl
from embodix.quantization.accuracy import sqnr_db
from embodix.quantization.gate_rules import RecipeNumbers
from embodix.quantization.selection import ModuleChoice, choose_modules
from embodix.tensor_file import FileFormatError, TensorSpec

SCALE = ".weight_row_scale"
METHOD = "int8_rows"


@hookimpl
def register_quantizers() -> list[Registration]:
    return [
        Registration("int8_rows", "int8_rows:Int8Rows", "int8, one scale a row"),
        Registration("int8_in_place", "int8_rows:Int8InPlace", "the same without files"),
    ]


@hookimpl
def register_config_packages() -> list[Registration]:
    return [Registration("int8_rows", "int8_rows_conf:__name__", "int8 with one scale a row")]


@dataclass(frozen=True)
class RowScaled:
    """int8 ``[N, K]`` and float32 scales ``[N]``."""

    values_NK: Tensor
    scale_N: Tensor

    @classmethod
    def of(cls, weight_NK: Tensor) -> RowScaled:
        wide_NK = weight_NK.detach().float()
        scale_N = wide_NK.abs().amax(dim=1).clamp(min=1e-12) / 127
        return cls((wide_NK / scale_N[:, None]).round().to(torch.int8), scale_N)

    def tensors(self) -> dict[str, Tensor]:
        return {WEIGHT: self.values_NK, SCALE: self.scale_N}

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self.values_NK.float() * self.scale_N[:, None]).to(dtype)

    def sqnr_db(self, weight_NK: Tensor) -> float:
        return sqnr_db(weight_NK, self.dequantize(torch.float32))


class RowLayout:
    """What the files hold."""

    def to_json(self) -> dict[str, Any]:
        return {"quant_method": METHOD}

    def describe(self) -> dict[str, Any]:
        return {}

    def specs(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        return {WEIGHT: TensorSpec(torch.int8, shape), SCALE: TensorSpec(torch.float32, shape[:1])}

    def quantize(self, weight: Tensor) -> RowScaled:
        return RowScaled.of(weight)


class RowScaledWeights(QuantizedWeights[RowLayout, RowScaled]):
    """A folder."""

    def parse_layout(self, fields: Any, place: str) -> RowLayout:
        if fields != RowLayout().to_json():
            raise FileFormatError(f"{place} must be {RowLayout().to_json()}; got {fields}.")
        return RowLayout()

    def quantized_modules(self) -> dict[str, TensorSpec]:
        paths = [name.removesuffix(SCALE) for name in self.specs if name.endswith(SCALE)]
        return {path: self.specs[path + WEIGHT] for path in sorted(paths)}

    def stored_weight(self, module: str) -> RowScaled:
        return RowScaled(self.tensor(module + WEIGHT), self.tensor(module + SCALE))

    @property
    def summary(self) -> str:
        return f"{len(self.modules)} weights in int8"


class InPlace:
    """Rounded weights in a policy."""

    def __init__(self, name: str, policy: nn.Module, chosen: list[ModuleChoice], originals: dict[str, Any]) -> None:
        self._name, self._policy, self._chosen, self._originals = name, policy, chosen, originals

    def describe(self) -> dict[str, Any]:
        converted = [
            {"path": c.path, "shape": list(c.shape), "kernel": "dense", "reason": c.reason} for c in self._chosen
        ]
        return {"name": self._name, "converted": converted}

    def uninstall(self) -> None:
        for path, weight in self._originals.items():
            self._policy.get_submodule(path).weight = weight


class Int8InPlace:
    """For evaluation and rollouts alone."""

    name = "int8_in_place"

    def install(
        self,
        policy: nn.Module,
        policy_type: str,
        *,
        stored: Mapping[str, RowScaled] | None = None,
        keep_originals: bool = True,
    ) -> InPlace:
        chosen = [choice for choice in choose_modules(policy, policy_type) if choice.convert]
        originals = {}
        for choice in chosen:
            module = policy.get_submodule(choice.path)
            original = module.weight
            scaled = RowScaled.of(original) if stored is None else stored[choice.path]
            module.weight = nn.Parameter(scaled.dequantize(original.dtype), requires_grad=False)
            if keep_originals:
                originals[choice.path] = original
        return InPlace(self.name, policy, chosen, originals)


class Int8Rows(Int8InPlace):
    """The quantizer with its files."""

    name = "int8_rows"
    words = FormatWords(
        name="int8",
        title="int8 (one scale a row)",
        sentence="int8, one scale a row",
        glossary={"int8": "A whole number from -127 to 127, times a scale."},
    )

    def __init__(self, *, embeddings: bool = False) -> None:
        if embeddings:
            raise ValueError("int8_rows leaves embeddings as they are.")

    def choose(self, policy: nn.Module, policy_type: str) -> list[ModuleChoice]:
        return choose_modules(policy, policy_type)

    def layout(self, converted: Sequence[str], skipped: Sequence[str]) -> RowLayout:
        return RowLayout()

    def recognises(self, folder: Path) -> bool:
        config = folder / "config.json"
        fields = json.loads(config.read_text()) if config.is_file() else {}
        return fields.get("quantization_config", {}).get("quant_method") == METHOD

    def open(self, folder: Path) -> RowScaledWeights:
        return RowScaledWeights(folder)

    def recipe_numbers(self, description: Mapping[str, Any]) -> RecipeNumbers:
        return RecipeNumbers(mantissa_bits=6)
