# SPDX-License-Identifier: Apache-2.0
"""The language model of a quantized policy alone, as transformers and vLLM load a fine-grained FP8 checkpoint.

Linear layers in FP8 with 128 x 128 blocks, everything else in one floating-point type; names, ``config.json`` and
``quantization_config`` are those of the class of transformers that the policy's record names. Sources:
transformers/integrations/finegrained_fp8.py and vllm/model_executor/layers/quantization/fp8.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodix.checkpoints.quantized_weights import WEIGHT
from embodix.contracts import LanguageModel
from embodix.policies.support import require_offered
from embodix.tensor_file import WEIGHTS_FILE, TensorFileWriter, TensorSpec
from embodix_fp8.blocks import FLOAT8, SCALE
from embodix_fp8.file_format import BlockConfig, BlockScaledWeights

EMBEDDING = "embed_tokens"


@dataclass(frozen=True)
class ExportedLanguageModel:
    """What was written.

    Attributes:
        folder: as ``from_pretrained`` takes it.
        architecture: class of transformers.
        num_quantized: layers in FP8.
        ragged: layers that stay in high precision since their sizes are no multiples of the block's.
        dtype: of everything that is not in FP8.
    """

    folder: Path
    architecture: str
    num_quantized: int
    ragged: list[str]
    dtype: torch.dtype

    def to_json(self) -> dict[str, Any]:
        """For the record of ``lerobot quantize``."""
        return {
            "architecture": self.architecture,
            "num_quantized": self.num_quantized,
            "in_high_precision": self.ragged,
            "dtype": str(self.dtype).removeprefix("torch."),
        }


def export_language_model(
    policy: nn.Module, policy_type: str, weights: BlockScaledWeights, folder: Path, dtype: torch.dtype | None = None
) -> ExportedLanguageModel:
    """Write the language model of a quantized policy into a folder.

    The vocabulary head is tied to the token embedding, as both models are published: the policy has no use for its own.

    Args:
        policy: its skeleton, for the config.
        policy_type: of LeRobot.
        weights: of the whole quantized policy.
        folder: made where it is missing.
        dtype: of what is not in FP8; None for that of the token embedding, bfloat16 where that is in FP8.

    Raises:
        ValueError: no layer whose sizes are multiples of the block's: transformers' FP8 takes whole blocks only.
    """
    source = _language_model(policy_type)
    exported = {module: spec for module, spec in weights.modules.items() if module.startswith(f"{source.path}.layers.")}
    ragged = [module for module, spec in exported.items() if not _whole_blocks(spec.shape, weights.layout.block)]
    if len(ragged) == len(exported):
        shapes = sorted({exported[module].shape for module in ragged})
        raise ValueError(
            "export_language_model writes what transformers loads, and its fine-grained FP8 takes weights of whole "
            f"blocks of {weights.layout.block} only (Fp8Dequantize); this policy has none: {shapes}. Leave it out."
        )
    if dtype is None:
        embedding = weights.specs[f"{source.path}.{EMBEDDING}{WEIGHT}"].dtype
        dtype = torch.bfloat16 if embedding == FLOAT8 else embedding
    left_out = [_exported_name(module, source) for module in ragged]
    folder.mkdir(parents=True, exist_ok=True)
    _config(
        policy.get_submodule(source.path), source, BlockConfig(weights.layout.block, ("lm_head", *left_out)), dtype
    ).save_pretrained(folder)
    quantized = set(exported) - set(ragged)
    specs = dict(_specs(weights, source, quantized, dtype))
    with TensorFileWriter(folder / WEIGHTS_FILE, specs, {"format": "pt"}) as writer:
        for name, tensor in _tensors(weights, source, quantized, dtype):
            writer.write(name, tensor)
    return ExportedLanguageModel(folder, source.architecture, len(quantized), left_out, dtype)


def _config(decoder: Any, source: LanguageModel, quantization: BlockConfig, dtype: torch.dtype) -> Any:
    """The decoder's own config, of as many layers as it has."""
    config = copy.deepcopy(decoder.config)
    config.architectures = [source.architecture]
    config.tie_word_embeddings = True
    config.num_hidden_layers = len(decoder.layers)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    config.dtype = dtype
    config.quantization_config = quantization.to_json()
    return config


def _specs(
    weights: BlockScaledWeights, source: LanguageModel, quantized: set[str], dtype: torch.dtype
) -> Iterator[tuple[str, TensorSpec]]:
    for name, spec in weights.specs.items():
        if not name.startswith(source.path + "."):
            continue
        module = name.removesuffix(SCALE).removesuffix(WEIGHT)
        if module in quantized:
            yield _exported_name(name, source), spec
        elif not name.endswith(SCALE):
            yield _exported_name(name, source), TensorSpec(dtype, spec.shape)


def _tensors(
    weights: BlockScaledWeights, source: LanguageModel, quantized: set[str], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """One in memory at a time."""
    for module in sorted(quantized):
        scaled = weights.stored_weight(module)
        yield _exported_name(module + WEIGHT, source), scaled.values
        yield _exported_name(module + SCALE, source), scaled.scale_inv
    others = {module + WEIGHT for module in quantized}
    for name, tensor in weights.state(dtype, lambda name: name.startswith(source.path + ".") and name not in others):
        yield _exported_name(name, source), tensor.to(dtype)


def _exported_name(name: str, source: LanguageModel) -> str:
    return f"model{name.removeprefix(source.path)}"


def _whole_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> bool:
    return all(size % edge == 0 for size, edge in zip(shape, block, strict=True))


def _language_model(policy_type: str) -> LanguageModel:
    known = "The language model alone is exported of"
    support = require_offered(policy_type, "language_model", known, "Leave export_language_model out.")
    assert support.language_model is not None
    return support.language_model
