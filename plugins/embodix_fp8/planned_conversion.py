# SPDX-License-Identifier: Apache-2.0
"""What becomes of every tensor of a policy when its checkpoint is quantized, decided before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from embodix.checkpoints.skeleton import source_names
from embodix.checkpoints.weight_loading import WeightLoadError, listed
from embodix.quantization.selection import ModuleChoice, choose_modules
from embodix_fp8.conversion import ConversionPlan, modules_left_out, written_specs
from embodix_fp8.file_format import WEIGHT, BlockConfig
from embodix_fp8.sizes import SizeDefinition, SizeTable, part_of, size_definitions, size_table
from embodix_fp8.tensor_file import TensorSpec

UnusedHeads = Literal["keep", "quantize", "drop"]


@dataclass(frozen=True)
class Recipe:
    """What to convert.

    Attributes:
        embeddings: the token embedding, too.
        unused_heads: vocabulary heads that nothing reads: kept in high precision, quantized, or left out.
        rest_dtype: of the other weights; None keeps the file's.
    """

    embeddings: bool = False
    unused_heads: UnusedHeads = "keep"
    rest_dtype: torch.dtype | None = None


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
        """Modules that the file has in FP8."""
        return [choice for choice in self.choices if choice.path in self.plan.convert]

    @property
    def sizes(self) -> SizeTable:
        """Bytes by part."""
        return size_table(self.before, self.after, self.policy_type)

    @property
    def size_definitions(self) -> list[SizeDefinition]:
        """What percentages the policy gives, all tensors in bfloat16 before."""
        every = choose_modules(self.policy, self.policy_type, embeddings=True, unused_heads=True)
        return size_definitions(self.before, self.policy_type, [choice.path for choice in every if choice.convert])


def plan_conversion(
    policy: nn.Module, policy_type: str, recipe: Recipe, source: Mapping[str, TensorSpec] | None = None
) -> PlannedConversion:
    """Plan the conversion of a policy.

    Args:
        policy: the skeleton, see ``embodix.checkpoints.skeleton``.
        policy_type: of LeRobot.
        recipe: what to convert.
        source: tensors of its checkpoint's files, in their order; None for a policy that has none.

    Raises:
        WeightLoadError: the checkpoint's tensors are not those of the policy, in name or shape.
        ValueError: a policy type whose language model is not known.
    """
    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in policy.state_dict().items()}
    source = specs if source is None else source
    names = source_names(policy, source)
    before = {name: source[source_name] for name, source_name in names.items()}
    _require_same_shapes(specs, before)
    quantizes_heads = recipe.unused_heads == "quantize"
    choices = choose_modules(policy, policy_type, embeddings=recipe.embeddings, unused_heads=quantizes_heads)
    convert = {choice.path: specs[choice.path + WEIGHT].dtype for choice in choices if choice.convert}
    convert = {path: dtype for path, dtype in convert.items() if path + WEIGHT in before}
    heads = [name for name in before if part_of(name, policy_type) == "unused_head"]
    skipped = [choice.path for choice in choices if choice.path not in convert]
    plan = ConversionPlan(
        names=names,
        convert=convert,
        drop=heads if recipe.unused_heads == "drop" else [],
        rest_dtype=recipe.rest_dtype,
        config=BlockConfig(modules_to_not_convert=modules_left_out(skipped, convert)),
    )
    return PlannedConversion(policy, policy_type, choices, before, written_specs(source, plan), plan)


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
