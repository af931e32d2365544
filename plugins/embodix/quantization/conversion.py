# SPDX-License-Identifier: Apache-2.0
"""What becomes of every tensor of a checkpoint when it is quantized, decided before it is read; and writing it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from embodix.checkpoints.quantized_weights import WEIGHT, file_metadata
from embodix.checkpoints.skeleton import WeightLoadError, listed, source_names
from embodix.contracts import CheckpointQuantizer, StoredWeight, WeightLayout
from embodix.quantization.selection import ModuleChoice, choose_modules
from embodix.quantization.sizes import SizeDefinition, SizeTable, part_of, size_definitions, size_table
from embodix.tensor_file import WEIGHTS_FILE, TensorFiles, TensorFileWriter, TensorSpec


@dataclass(frozen=True)
class ConversionPlan:
    """What becomes of the tensors of a model.

    Attributes:
        names: name in the quantized file -> name in the source; a dropped tensor's included.
        convert: module path -> the dtype in which the policy holds its weight, which is what gets quantized: so that
            the file equals what quantizing the loaded policy gives.
        drop: names that are left out.
        rest_dtype: of the other floating-point tensors; None keeps the source's.
        layout: of the converted weights.
    """

    names: Mapping[str, str]
    convert: Mapping[str, torch.dtype]
    drop: Collection[str]
    rest_dtype: torch.dtype | None
    layout: WeightLayout


@dataclass(frozen=True)
class PlannedConversion:
    """A plan and what it will give.

    Attributes:
        policy: the skeleton.
        policy_type: of LeRobot.
        choices: every linear layer and embedding.
        before: tensors of the source under the policy's names.
        after: tensors of the quantized file.
        plan: for ``write_weights``.
    """

    policy: nn.Module
    policy_type: str
    choices: list[ModuleChoice]
    before: dict[str, TensorSpec]
    after: dict[str, TensorSpec]
    plan: ConversionPlan

    @property
    def converted(self) -> list[ModuleChoice]:
        """Modules that the file has quantized."""
        return [choice for choice in self.choices if choice.path in self.plan.convert]

    @property
    def sizes(self) -> SizeTable:
        """Bytes by part."""
        return size_table(self.before, self.after, self.policy_type)

    @property
    def size_definitions(self) -> list[SizeDefinition]:
        """What percentages the policy gives, all tensors in bfloat16 before."""
        every = choose_modules(self.policy, self.policy_type, embeddings=True, unused_heads=True)
        convertible = [choice.path for choice in every if choice.convert]
        return size_definitions(self.before, self.policy_type, convertible, self.quantized_bytes)

    def quantized_bytes(self, shape: tuple[int, ...]) -> int:
        """Of a weight of this shape."""
        return sum(spec.num_bytes for spec in self.plan.layout.specs(shape).values())


def plan_conversion(
    policy: nn.Module,
    policy_type: str,
    quantizer: CheckpointQuantizer,
    source: Mapping[str, TensorSpec] | None = None,
    *,
    drop_unused_heads: bool = False,
    rest_dtype: torch.dtype | None = None,
) -> PlannedConversion:
    """Plan the conversion of a policy.

    Args:
        policy: the skeleton, see ``embodix.checkpoints.skeleton``.
        policy_type: of LeRobot.
        quantizer: what chooses the modules and lays out their weights.
        source: tensors of its checkpoint's files, in their order; None for a policy that has none.
        drop_unused_heads: leave out vocabulary heads that nothing reads.
        rest_dtype: of the weights that are not quantized; None keeps the file's.

    Raises:
        WeightLoadError: the checkpoint's tensors are not those of the policy, in name or shape.
        ValueError: a policy type whose language model is not known.
    """
    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in policy.state_dict().items()}
    source = specs if source is None else source
    names = source_names(policy, source)
    before = {name: source[source_name] for name, source_name in names.items()}
    _require_same_shapes(specs, before)
    choices = quantizer.choose(policy, policy_type)
    weights = {choice.path: choice.path + WEIGHT for choice in choices if choice.convert}
    convert = {path: specs[name].dtype for path, name in weights.items() if name in before}
    heads = [name for name in before if part_of(name, policy_type) == "unused_head"]
    skipped = [choice.path for choice in choices if choice.path not in convert]
    plan = ConversionPlan(
        names=names,
        convert=convert,
        drop=heads if drop_unused_heads else [],
        rest_dtype=rest_dtype,
        layout=quantizer.layout(list(convert), skipped),
    )
    return PlannedConversion(policy, policy_type, choices, before, written_specs(source, plan), plan)


def written_specs(source: Mapping[str, TensorSpec], plan: ConversionPlan) -> dict[str, TensorSpec]:
    """Every tensor of the file to be written; ``source`` has the names of the source."""
    specs: dict[str, TensorSpec] = {}
    for name, source_name in plan.names.items():
        spec = source[source_name]
        if name in plan.drop:
            continue
        if _is_converted(name, plan):
            module = name.removesuffix(WEIGHT)
            specs |= {module + ending: part for ending, part in plan.layout.specs(spec.shape).items()}
        else:
            specs[name] = TensorSpec(_rest_dtype(spec.dtype, plan), spec.shape)
    return specs


def write_weights(
    source: TensorFiles,
    plan: ConversionPlan,
    folder: Path,
    on_converted: Callable[[str, Tensor, StoredWeight], None] = lambda *_: None,
) -> None:
    """Write ``model.safetensors`` and its digests into a folder, one tensor in memory at a time.

    Args:
        source: the model's tensors.
        plan: what becomes of them.
        folder: where nothing else reads yet.
        on_converted: called with the path, the weight and its quantized form of every converted module.

    Raises:
        ValueError: a weight that can't be quantized, such as one that is not finite; the message names it.
        OSError: the disk is full, or the folder can't be written.
    """
    metadata = file_metadata(plan.layout, {name: source.specs[plan.names[name]] for name in plan.drop})
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
            stored = _quantize(name, weight, plan.layout)
            for ending, part in stored.tensors().items():
                writer.write(module + ending, part)
            on_converted(module, weight, stored)


def _is_converted(name: str, plan: ConversionPlan) -> bool:
    return name.endswith(WEIGHT) and name.removesuffix(WEIGHT) in plan.convert


def _rest_dtype(dtype: torch.dtype, plan: ConversionPlan) -> torch.dtype:
    return plan.rest_dtype if plan.rest_dtype is not None and dtype.is_floating_point else dtype


def _quantize(name: str, weight: Tensor, layout: WeightLayout) -> StoredWeight:
    try:
        return layout.quantize(weight)
    except ValueError as error:
        raise ValueError(f"Tensor {name} can't be quantized: {error}") from error


def _require_same_shapes(policy: Mapping[str, TensorSpec], before: Mapping[str, TensorSpec]) -> None:
    different = [
        f"{name}: checkpoint {spec.shape}, policy {policy[name].shape}"
        for name, spec in before.items()
        if spec.shape != policy[name].shape
    ]
    if different:
        raise WeightLoadError(
            f"The checkpoint does not fit its policy.\n{listed({'other size': different})}\nIs the architecture the "
            "checkpoint's own?"
        )
