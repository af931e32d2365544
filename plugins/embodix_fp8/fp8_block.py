# SPDX-License-Identifier: Apache-2.0
"""The quantizer ``fp8_block``: the language model's linear layers in e4m3 with 128 x 128 block scales.

For inference: weights have no gradient. Vision tower, connector, action head, norms and the state of denoising stay in
the policy's own precision.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from embodix.contracts import FormatWords
from embodix.quantization.gate_rules import RecipeNumbers
from embodix.quantization.selection import ModuleChoice, choose_modules
from embodix_fp8.block_weight import BlockScaledWeight, require_compute_dtype
from embodix_fp8.blocks import BLOCK, ScaledWeight, quantize_blocks
from embodix_fp8.file_format import BlockConfig, BlockScaledWeights, is_quantized, modules_left_out
from embodix_fp8.format_words import FORMAT
from embodix_fp8.kernels import AT_LOAD, KERNELS, choose_kernel, require_options
from embodix_fp8.language_model_export import export_language_model
from embodix_fp8.side_by_side import formats_of_layers

LOOK_UP = "dequantize_rows"  # how an embedding is read
PRICE = (
    "Every forward pass turns their weights back into high precision first: they take a quarter of float32's memory "
    "(half of bfloat16's) and more time than unquantized ones. kernel=dequantize_at_load has the time and the memory "
    "of unquantized weights; strict=true stops here instead."
)
MANTISSA_BITS = 3  # of e4m3
_announced: set[str] = set()


@dataclass(frozen=True)
class ConvertedModule:
    """A module as it was and is.

    Attributes:
        choice: what was decided of it.
        module: whose weight was replaced.
        original: its Parameter; None where it was given up.
        kernel: what computes with it.
        fallback: why that is not FP8 tensor cores, where they were meant to.
        num_bytes: of the weight before and after.
    """

    choice: ModuleChoice
    module: nn.Module
    original: nn.Parameter | None
    kernel: str
    fallback: str | None
    num_bytes: tuple[int, int]


class Fp8Weights:
    """Quantized weights in place in one policy."""

    def __init__(
        self, options: Mapping[str, Any], converted: Sequence[ConvertedModule], skipped: Sequence[ModuleChoice]
    ) -> None:
        self._options, self._converted, self._skipped = dict(options), list(converted), list(skipped)
        self._installed = True

    @property
    def fallback(self) -> str | None:
        """Which modules FP8 tensor cores were meant to compute and do not, and why; None where all is as meant."""
        return _fallback_sentence([(module.kernel, module.fallback) for module in self._converted])

    def describe(self) -> dict[str, Any]:
        """Options, kernels and every linear layer and embedding, for reports."""
        before, after = (sum(module.num_bytes[side] for module in self._converted) for side in (0, 1))
        return {
            "name": Fp8BlockQuantizer.name,
            **self._options,
            "block": list(BLOCK),
            "backend": dict(Counter(module.kernel for module in self._converted)),
            "fallback": self.fallback,
            "num_bytes": {"before": before, "after": after},
            "converted": [
                {"path": m.choice.path, "shape": list(m.choice.shape), "kernel": m.kernel, "reason": m.choice.reason}
                for m in self._converted
            ],
            "skipped": [{"path": c.path, "shape": list(c.shape), "reason": c.reason} for c in self._skipped],
        }

    def uninstall(self) -> None:
        """Put the original Parameters back; nothing where they were given up or are back already."""
        if self._installed:
            _restore(self._converted)
        self._installed = False


class Fp8BlockQuantizer:
    """Replaces the weights of a policy's chosen modules.

    Args:
        activations: ``auto`` multiplies in FP8 where tensor cores do, else in high precision; ``high`` rounds only the
            weights; ``fp8`` rounds activations everywhere, in groups of 128 channels.
        kernel: ``auto``, or one of ``embodix_fp8.kernels.KernelName``.
        embeddings: the language model's token embedding too.
        unused_heads: the language model's head too, which nothing reads.
        strict: a fallback is an error.

    Raises:
        ValueError: an option that does not exist, or two that exclude each other.
    """

    name, words = "fp8_block", FormatWords(**FORMAT)
    recognises, open = staticmethod(is_quantized), staticmethod(BlockScaledWeights)
    compare_formats = staticmethod(formats_of_layers)

    def __init__(
        self,
        *,
        activations: str = "auto",
        kernel: str = "auto",
        embeddings: bool = False,
        unused_heads: bool = False,
        strict: bool = False,
    ) -> None:
        require_options(activations, kernel)
        self.activations, self.kernel, self.strict = activations, kernel, strict
        self.embeddings, self.unused_heads = embeddings, unused_heads

    @property
    def options(self) -> dict[str, Any]:
        """As in the config."""
        names = ("activations", "kernel", "embeddings", "unused_heads", "strict")
        return {name: getattr(self, name) for name in names}

    def install(
        self,
        policy: nn.Module,
        policy_type: str,
        *,
        stored: Mapping[str, ScaledWeight] | None = None,
        keep_originals: bool = True,
    ) -> Fp8Weights:
        """Quantize the chosen modules, one after the other.

        Args:
            policy: LeRobot's bare policy.
            policy_type: of LeRobot.
            stored: module path -> weight of a quantized checkpoint, taken as it is.
            keep_originals: keep the replaced Parameters, so that they can be put back.

        Raises:
            ValueError: another policy, one in float16 or quantized already, weights that are not finite, stored weights
                that are not those of the chosen modules, a kernel that can't run here, or a fallback under ``strict``.
        """
        choices = self.choose(policy, policy_type)
        chosen = [choice for choice in choices if choice.convert]
        _require_quantizable(policy, chosen)
        if stored is not None:
            _require_stored(chosen, stored)
        kernels = self._kernels(policy, chosen)
        self._announce(kernels)
        converted: list[ConvertedModule] = []
        try:
            for choice, (kernel, fallback) in zip(chosen, kernels, strict=True):
                scaled = None if stored is None else stored[choice.path]
                converted.append(_convert(policy, choice, kernel, fallback, scaled, keep_originals))
        except BaseException:
            _restore(converted)
            raise
        return Fp8Weights(self.options, converted, [c for c in choices if not c.convert])

    def choose(self, policy: nn.Module, policy_type: str) -> list[ModuleChoice]:
        """Every linear layer and embedding, with what is done with it."""
        return choose_modules(policy, policy_type, embeddings=self.embeddings, unused_heads=self.unused_heads)

    def layout(self, converted: Sequence[str], skipped: Sequence[str]) -> BlockConfig:
        """What the files of a model say, with the modules that they leave in high precision."""
        return BlockConfig(modules_to_not_convert=modules_left_out(skipped, converted))

    def recipe_numbers(self, description: Mapping[str, Any]) -> RecipeNumbers:
        """Weights in e4m3, and what else is rounded to it: activations by some kernels, token embeddings."""
        converted = description["converted"]
        kernels = {module["kernel"] for module in converted} & set(KERNELS)
        activations = any(KERNELS[name].fp8_activations for name in kernels)
        embeddings = any(module["path"].endswith("embed_tokens") for module in converted)
        return RecipeNumbers(MANTISSA_BITS, num_operands=1 + activations + embeddings)

    def export_language_model(
        self, policy: nn.Module, policy_type: str, source: Path, folder: Path, dtype: torch.dtype | None
    ) -> dict[str, Any]:
        """The language model alone, as transformers and vLLM load a fine-grained FP8 checkpoint."""
        with BlockScaledWeights(source) as weights:
            return export_language_model(policy, policy_type, weights, folder, dtype).to_json()

    def _kernels(self, policy: nn.Module, chosen: Sequence[ModuleChoice]) -> list[tuple[str, str | None]]:
        """Name of the kernel of every chosen module, and why it is a fallback."""
        weight = _module(policy, chosen[0].path).weight
        num_weights = sum(choice.shape[0] * choice.shape[1] for choice in chosen)
        decided = choose_kernel(self.activations, self.kernel, weight.device, weight.dtype, num_weights)
        kernels: list[tuple[str, str | None]] = []
        for choice in chosen:
            kernel, fallback = decided.of(choice.shape)
            if kernel is None:
                kernels.append((AT_LOAD, None))
            elif choice.kind == "embedding":
                kernels.append((LOOK_UP, None))
            else:
                kernels.append((kernel.name, fallback))
        return kernels

    def _announce(self, kernels: Sequence[tuple[str, str | None]]) -> None:
        """Say once what a fallback costs, or refuse it."""
        fallback = _fallback_sentence(kernels)
        if fallback is None:
            return
        if self.strict:
            raise ValueError(f"strict=true, and {fallback}. Set strict=false, or run where they can.")
        if fallback not in _announced:
            _announced.add(fallback)
            logging.warning("quantization=%s: %s. %s", self.name, fallback, PRICE)


def _fallback_sentence(kernels: Sequence[tuple[str, str | None]]) -> str | None:
    """How many modules fall back, to what and why; None where none does."""
    fallbacks = [(kernel, reason) for kernel, reason in kernels if reason is not None]
    if not fallbacks:
        return None
    used = ", ".join(sorted({kernel for kernel, _ in fallbacks}))
    reasons = Counter(reason for _, reason in fallbacks)
    listed = "; ".join(f"{count} because {reason}" for reason, count in reasons.items())
    return f"{len(fallbacks)} of {len(kernels)} modules run without FP8 tensor cores (by {used}): {listed}"


def _require_quantizable(policy: nn.Module, chosen: Sequence[ModuleChoice]) -> None:
    half = next((name for name, parameter in policy.named_parameters() if parameter.dtype == torch.float16), None)
    if half is not None:
        raise ValueError(
            f"A policy in float16 is not quantized: its range is what action errors grow out of; got {half} in "
            "float16. Load the policy in bfloat16 or float32."
        )
    for choice in chosen:
        weight = _module(policy, choice.path).weight
        if isinstance(weight, BlockScaledWeight):
            raise ValueError(f"{choice.path} is quantized already; uninstall that first.")
        require_compute_dtype(weight.dtype)


def _require_stored(chosen: Sequence[ModuleChoice], stored: Mapping[str, ScaledWeight]) -> None:
    """A quantized checkpoint and the options must name the same modules, in the same shapes."""
    wanted = {choice.path: choice.shape for choice in chosen}
    if missing := sorted(wanted.keys() - stored.keys()):
        raise ValueError(
            f"The options convert {len(missing)} module(s) that the checkpoint has in high precision "
            f"({missing[0]}, ...). Give embeddings and unused_heads as it was quantized with."
        )
    if extra := sorted(stored.keys() - wanted.keys()):
        raise ValueError(
            f"The checkpoint has {len(extra)} module(s) in FP8 that the options leave in high precision "
            f"({extra[0]}, ...). Give embeddings and unused_heads as it was quantized with."
        )
    for path, shape in wanted.items():
        found, block = tuple(stored[path].values.shape), stored[path].block
        if found != shape or block != BLOCK:
            raise ValueError(
                f"{path} is {shape} in blocks of {BLOCK} here; the checkpoint has {found} in blocks of {block}."
            )


def _convert(
    policy: nn.Module,
    choice: ModuleChoice,
    kernel: str,
    fallback: str | None,
    stored: ScaledWeight | None,
    keep_original: bool,
) -> ConvertedModule:
    module = _module(policy, choice.path)
    original: nn.Parameter = module.weight
    scaled = _quantize(choice, original) if stored is None else _moved(stored, original.device)
    weight = (
        scaled.dequantize(original.dtype) if kernel == AT_LOAD else BlockScaledWeight(scaled, original.dtype, kernel)
    )
    module.weight = nn.Parameter(weight, requires_grad=False)
    num_bytes = (original.nbytes, module.weight.nbytes)
    return ConvertedModule(choice, module, original if keep_original else None, kernel, fallback, num_bytes)


def _quantize(choice: ModuleChoice, weight: torch.Tensor) -> ScaledWeight:
    try:
        return quantize_blocks(weight)
    except ValueError as error:
        raise ValueError(f"{choice.path}.weight: {error}") from error


def _moved(scaled: ScaledWeight, device: torch.device) -> ScaledWeight:
    return ScaledWeight(scaled.values.to(device), scaled.scale_inv.to(device), scaled.block)


def _restore(converted: Sequence[ConvertedModule]) -> None:
    for module in converted:
        if module.original is not None:
            module.module.weight = module.original


def _module(policy: nn.Module, path: str) -> Any:
    return policy.get_submodule(path)
