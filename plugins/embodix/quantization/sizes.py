# SPDX-License-Identifier: Apache-2.0
"""How many bytes a quantized checkpoint saves, by part, and under which definitions a percentage is what it is.

The same weights give 12 % or 50 %: the figure depends on the dtype before, on which parts count, and on whether tensors
that nothing reads are counted. ``size_definitions`` lists them side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from embodix.checkpoints.quantized_weights import WEIGHT
from embodix.contracts import ModuleKind
from embodix.quantization.selection import module_kind
from embodix.tensor_file import TensorSpec

PARTS: dict[ModuleKind, str] = {
    "language_linear": "language model: decoder's linear layers",
    "embedding": "language model: token embedding",
    "unused_head": "unused vocabulary heads",
    "vision": "vision tower",
    "connector": "connector",
    "action_head": "action head",
    "other": "norms and the rest",
}
Parts = tuple[ModuleKind, ...]
ALL_PARTS: Parts = tuple(PARTS)
LANGUAGE_MODEL: Parts = ("language_linear", "embedding", "unused_head")


@dataclass(frozen=True)
class PartSize:
    """Bytes of one part.

    Attributes:
        part: in words.
        num_parameters: weights, without scales.
        bytes_before, bytes_after: in the source and in the quantized file, scales included.
    """

    part: str
    num_parameters: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class SizeTable:
    """Bytes of a checkpoint's weights before and after, by part."""

    parts: list[PartSize]

    @property
    def total(self) -> PartSize:
        """All parts together."""
        columns = [(part.num_parameters, part.bytes_before, part.bytes_after) for part in self.parts]
        return PartSize("all", *(sum(column) for column in zip(*columns, strict=True)))

    @property
    def reduction(self) -> float:
        """Share of the bytes that is saved."""
        return _reduction(self.total.bytes_before, self.total.bytes_after)

    def to_json(self) -> dict[str, Any]:
        """For results: the parts, their sum and the share that is saved."""
        total = {**asdict(self.total), "reduction": self.reduction}
        return {"parts": [asdict(part) for part in self.parts], "total": total}


def size_table(before: Mapping[str, TensorSpec], after: Mapping[str, TensorSpec], policy_type: str) -> SizeTable:
    """Compare two files of the same policy.

    Args:
        before: tensors of the source, under the policy's names.
        after: tensors of the quantized file; scales count for the part of their weight.
    """
    parts = []
    for part, words in PARTS.items():
        old = [spec for name, spec in before.items() if part_of(name, policy_type) == part]
        written = [spec for name, spec in after.items() if part_of(name, policy_type) == part]
        if old:
            num_parameters = sum(spec.num_elements for spec in old)
            parts.append(PartSize(words, num_parameters, _num_bytes(old), _num_bytes(written)))
    return SizeTable(parts)


@dataclass(frozen=True)
class SizeDefinition:
    """One way to state the saving.

    Attributes:
        name: what is quantized, and of what the percentage is.
        bytes_before, bytes_after: under this definition.
    """

    name: str
    bytes_before: int
    bytes_after: int

    @property
    def reduction(self) -> float:
        """Share of the bytes that is saved."""
        return _reduction(self.bytes_before, self.bytes_after)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "reduction": self.reduction}


def size_definitions(
    tensors: Mapping[str, TensorSpec],
    policy_type: str,
    convertible: Collection[str],
    quantized_bytes: Callable[[tuple[int, ...]], int],
    dtype: torch.dtype = torch.bfloat16,
) -> list[SizeDefinition]:
    """The percentages that the same policy gives.

    Args:
        tensors: of the policy, unquantized.
        policy_type: of LeRobot.
        convertible: paths of the modules that are quantized when embeddings and unused heads are asked for, too.
        quantized_bytes: of a weight of a shape, its scales included.
        dtype: of all tensors before, and of those that stay as they are.
    """
    plain, quantized = dict.fromkeys(ALL_PARTS, 0), dict.fromkeys(ALL_PARTS, 0)
    for name, spec in tensors.items():
        part, size = part_of(name, policy_type), spec.num_elements * dtype.itemsize
        plain[part] += size
        quantized[part] += quantized_bytes(spec.shape) if _weight_of(name, convertible) else size
    return [
        SizeDefinition(
            words,
            sum(plain[part] for part in counted),
            sum(quantized[part] if part in converted else plain[part] for part in kept),
        )
        for words, converted, counted, kept in _definitions()
    ]


def _definitions() -> list[tuple[str, Parts, Parts, Parts]]:
    """In words, then the parts that are quantized, those that count before, and those that are still there."""
    linears, language_model = LANGUAGE_MODEL[:1], LANGUAGE_MODEL[:2]
    backbone: Parts = (*language_model, "vision", "connector")
    without_heads = tuple(part for part in ALL_PARTS if part != "unused_head")
    return [
        ("decoder's linear layers, of all tensors", linears, ALL_PARTS, ALL_PARTS),
        ("decoder's linear layers, of what is read: unused heads not counted", linears, without_heads, without_heads),
        ("decoder's linear layers, of all tensors; unused heads dropped", linears, ALL_PARTS, without_heads),
        ("decoder's linear layers, of vision and language model", linears, backbone, backbone),
        ("decoder's linear layers, of the language model", linears, language_model, language_model),
        ("decoder's linear layers and token embedding, of all tensors", language_model, ALL_PARTS, ALL_PARTS),
        ("whole language model with its head, of all tensors", LANGUAGE_MODEL, ALL_PARTS, ALL_PARTS),
    ]


def part_of(name: str, policy_type: str) -> ModuleKind:
    """The part of the policy that a tensor belongs to."""
    return module_kind(name.rpartition(".")[0], policy_type)


def _weight_of(name: str, modules: Collection[str]) -> bool:
    return name.endswith(WEIGHT) and name.removesuffix(WEIGHT) in modules


def _num_bytes(specs: Collection[TensorSpec]) -> int:
    return sum(spec.num_bytes for spec in specs)


def _reduction(before: int, after: int) -> float:
    return 1 - after / before
