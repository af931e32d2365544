# SPDX-License-Identifier: Apache-2.0
"""The accuracy gate: a policy against its low-precision self on held-out samples, judged by the rules of
``embodix.quantization.gate_rules``.

``run_gate`` judges a policy, ``gated_checkpoint`` what a run has left: its policy and samples of its data set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from lerobot.policies.factory import get_policy_class
from omegaconf import DictConfig
from torch import Tensor, nn

from embodix import plugins
from embodix.checkpoints.model_folder import ModelFolder
from embodix.checkpoints.policy_loading import policy_config, prepared_host
from embodix.checkpoints.processor_files import load_processors
from embodix.contracts import ComparesFormats, LowPrecision, ModuleKind
from embodix.policies.settings import FastPathSettings
from embodix.policies.support import support_of
from embodix.quantization.accuracy import Comparison, LayerAccuracy, relative_error, sqnr_db, worst_row_sqnr_db
from embodix.quantization.accuracy_probe import (
    WORDS,
    AccuracyProbe,
    LayerTensors,
    Recording,
    compute_dtype,
    other_precision,
)
from embodix.quantization.gate_rules import DEFINITIONS, RecipeNumbers, RuleResult, judge, named_numbers, rules_to_json
from embodix.quantization.held_out import HeldOutBatches, held_out_batches
from embodix.quantization.selection import module_kind
from embodix.schema.gate import AccuracyGateSettings

LANGUAGE_MODEL: tuple[ModuleKind, ...] = ("language_linear", "embedding", "unused_head")


class JudgedQuantizer(Protocol):
    """The part of a ``CheckpointQuantizer`` that the gate needs."""

    def install(self, policy: nn.Module, policy_type: str) -> LowPrecision: ...

    def recipe_numbers(self, description: Mapping[str, Any]) -> RecipeNumbers: ...


@dataclass(frozen=True)
class GateResult:
    """What was measured and what the rules say of it.

    Attributes:
        comparison: the low precision against the policy as it is.
        yardstick: bfloat16 against float32 on the same samples.
        recipe: the installation's own description.
        numbers: what the formulas were evaluated with.
        rules: the verdicts.
        samples: where the samples come from, in words.
        num_episodes: that they are from.
        formats: other formats beside it on the converted layers, see ``ComparesFormats``; no ``rows`` for none.
    """

    comparison: Comparison
    yardstick: Comparison
    recipe: Mapping[str, Any]
    numbers: Mapping[str, float]
    rules: list[RuleResult]
    samples: str
    num_episodes: int
    formats: Mapping[str, Any]

    @property
    def failures(self) -> list[str]:
        """A sentence for each broken rule, with what breaks it most."""
        return [sentence for result in self.rules if (sentence := result.failure()) is not None]

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """Plain containers."""
        return {
            "passed": self.passed,
            "failures": self.failures,
            "samples": {
                "source": self.samples,
                "num_samples": self.comparison.num_samples,
                "num_episodes": self.num_episodes,
            },
            "rules": rules_to_json(self.rules),
            "definitions": dict(DEFINITIONS),
            "numbers": dict(self.numbers),
            "comparison": self.comparison.to_json(),
            "yardstick": self.yardstick.to_json(),
            "recipe": {**self.recipe, "fallback": self.recipe.get("fallback")},
            "formats": dict(self.formats),
        }


def run_gate(
    policy: nn.Module,
    policy_type: str,
    postprocessor: Callable[[Tensor], Tensor],
    samples: HeldOutBatches,
    quantizer: JudgedQuantizer,
    settings: AccuracyGateSettings,
) -> GateResult:
    """Compare a policy with its quantized self; the policy is left as it was, its random stream too.

    The policy as it is, in float32 or bfloat16, is the reference. Where it computes upstream's way, both are measured
    in the packed computation, which gives the same function.

    Args:
        policy: LeRobot's, as loaded; quantized by ``quantizer`` for the measurement.
        postprocessor: its own.
        samples: preprocessed batches with actions.

    Raises:
        ValueError: samples of fewer than two episodes, a float16 policy, a policy whose denoising can't be watched, or
            a quantizer that converts nothing.
    """

    def install() -> LowPrecision:
        return quantizer.install(policy, policy_type)

    numbers_of = quantizer.recipe_numbers
    compare = quantizer.compare_formats if isinstance(quantizer, ComparesFormats) else None
    return run_low_precision_gate(
        policy, policy_type, postprocessor, samples, install, numbers_of, settings, compare_formats=compare
    )


def run_low_precision_gate(
    policy: nn.Module,
    policy_type: str,
    postprocessor: Callable[[Tensor], Tensor],
    samples: HeldOutBatches,
    install: Callable[[], LowPrecision],
    numbers_of: Callable[[Mapping[str, Any]], RecipeNumbers],
    settings: AccuracyGateSettings,
    *,
    compare_formats: Callable[[Mapping[str, Tensor], Mapping[str, LayerTensors]], dict[str, Any]] | None = None,
) -> GateResult:
    """``run_gate`` for anything that ``install`` puts in place, a training precision too.

    Args:
        numbers_of: from the installation's description to what the formulas need.
        compare_formats: of ``ComparesFormats``.

    Raises:
        ValueError: as ``run_gate``.
    """
    _require_several(samples)
    own = compute_dtype(policy)
    with _undisturbed(policy, policy_type):
        probe = AccuracyProbe(policy, postprocessor, samples, settings.seed)
        got, weights, outside, recipe = _record_low_precision(policy, policy_type, probe, install)
        reference = probe.record(list(got.layers))
        with other_precision(policy) as other:
            other_recording = probe.record(list(got.layers))
        words = WORDS[own], str(recipe.get("name", "low precision"))
        compared = probe.compare(reference, got, words, samples.action_names)
        comparison = dataclasses.replace(_with_weights(compared, weights), outside=outside)
        pair = (reference, other_recording) if own is torch.float32 else (other_recording, reference)
        yardstick = probe.compare(*pair, (WORDS[torch.float32], WORDS[torch.bfloat16]), samples.action_names)
        originals = {path: weight for path, weight in _weights(policy) if path in weights}
        formats = {"rows": []} if compare_formats is None else compare_formats(originals, reference.layers)
    assert {own, other} == set(WORDS)
    numbers = numbers_of(recipe)
    return GateResult(
        comparison=comparison,
        yardstick=yardstick,
        recipe=recipe,
        numbers=named_numbers(comparison, numbers),
        rules=judge(comparison, numbers, settings.thresholds),
        samples=samples.description,
        num_episodes=len(set(samples.episodes)),
        formats=formats,
    )


def _record_low_precision(
    policy: nn.Module, policy_type: str, probe: AccuracyProbe, install: Callable[[], LowPrecision]
) -> tuple[Recording, dict[str, LayerAccuracy], list[str], Mapping[str, Any]]:
    """The recording in low precision, what it does to each weight, what it should not touch, and its description."""
    originals = dict(_weights(policy))
    installation = install()
    try:
        recipe = installation.describe()
        paths = [module["path"] for module in recipe["converted"]]
        if not paths:
            raise ValueError("The accuracy gate was asked to judge a low precision that converted no module.")
        weights = {path: _weight_accuracy(path, originals[path], policy.get_submodule(path)) for path in paths}
        unsaid = {path for path, weight in _weights(policy) if weight is not originals[path]} - set(paths)
        outside = [path for path in paths if module_kind(path, policy_type) not in LANGUAGE_MODEL]
        recording = probe.record(paths)
    finally:
        installation.uninstall()
    changed = [path for path, weight in _weights(policy) if weight is not originals[path]]
    assert not changed, f"uninstalling did not give back the weights of {changed}"
    return recording, weights, [*outside, *sorted(unsaid)], recipe


def _weights(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in policy.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            yield path, module.weight


def _weight_accuracy(path: str, original: Tensor, module: Any) -> LayerAccuracy:
    """The weight that the module computes with; nothing where it keeps its own and rounds within each product."""
    shape = tuple(original.shape)
    if module.weight is original:
        return LayerAccuracy(path, shape)
    got = dequantized(module.weight)
    return LayerAccuracy(
        path,
        shape,
        weight_db=sqnr_db(original, got),
        weight_row_db=worst_row_sqnr_db(original, got),
        weight_error=relative_error(original, got),
    )


def dequantized(weight: Any) -> Tensor:
    """The values that a weight stands for, in float32."""
    is_plain = type(weight) in (Tensor, nn.Parameter)
    values: Tensor = weight.detach().float() if is_plain else weight.dequantize(torch.float32)
    return values


def _with_weights(comparison: Comparison, weights: Mapping[str, LayerAccuracy]) -> Comparison:
    """Adds the weights' errors; a converted module that is not computed has nothing else."""
    computed = {layer.path: layer for layer in comparison.layers}
    layers = [
        dataclasses.replace(
            computed.get(path, weight),
            weight_db=weight.weight_db,
            weight_row_db=weight.weight_row_db,
            weight_error=weight.weight_error,
        )
        for path, weight in weights.items()
    ]
    return dataclasses.replace(comparison, layers=layers)


def _require_several(samples: HeldOutBatches) -> None:
    num_samples, num_episodes = len(samples.episodes), len(set(samples.episodes))
    if num_samples < 2 or num_episodes < 2:
        raise ValueError(
            "The accuracy gate compares on samples of two episodes at least: one observation says nothing of the "
            f"others. Got {num_samples} of {num_episodes}."
        )


@contextmanager
def _undisturbed(policy: Any, policy_type: str) -> Iterator[None]:
    """Evaluation mode and a packed computation; modes and the random stream are put back."""
    device = torch.device(str(policy.config.device))
    modes = [(module, module.training) for module in policy.modules()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), _packed(policy, policy_type):
        policy.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


@contextmanager
def _packed(policy: nn.Module, policy_type: str) -> Iterator[None]:
    """A fast path where the policy has none: its action sampler is the one that can be watched."""
    if "predict_action_chunk" in vars(policy):
        yield
        return
    packer = plugins.build("packers", "padding_free", {})
    installation = support_of(policy_type).wrapper().install(policy, FastPathSettings(packer, None))
    try:
        yield
    finally:
        installation.uninstall()


@dataclass(frozen=True)
class GatedCheckpoint:
    """What the gate measures: a policy, its postprocessor and samples.

    Any number of quantizers can be judged, one after the other.
    """

    policy: Any
    postprocessor: Any
    samples: HeldOutBatches
    settings: AccuracyGateSettings

    def judge(self, quantizer: JudgedQuantizer) -> GateResult:
        """``run_gate`` with this quantizer."""
        policy = self.policy
        return run_gate(policy, policy.config.type, self.postprocessor, self.samples, quantizer, self.settings)


@contextmanager
def gated_checkpoint(
    source: ModelFolder,
    cfg: DictConfig,
    settings: AccuracyGateSettings,
    policy: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
) -> Iterator[GatedCheckpoint]:
    """Load a checkpoint and its samples; its patches and its tokenizer are in force inside the block.

    Args:
        source: not quantized: the gate compares with the weights that it was trained to.
        cfg: the train config of its run, as ``source.compose_run`` gives it.
        policy: fields of the policy's config that are changed, for example ``device``.
        tokenizer: folder of an offline tokenizer; None for the run's.

    Raises:
        ValueError: a quantized checkpoint, no data set on this machine, or fewer than two episodes.
    """
    source = source.member(cfg)
    if source.quantizer() is not None:
        raise ValueError(
            f"The accuracy gate compares a checkpoint with its quantized self, and {source.model} is quantized "
            "already. Give the one that it was made from."
        )
    with prepared_host(source, cfg, tokenizer):
        config = policy_config(source, policy or {})
        samples = held_out_batches(source, cfg, settings, str(config.device))
        _, postprocessor = load_processors(config, source.model)
        loaded = get_policy_class(config.type).from_pretrained(source.model, config=config)
        yield GatedCheckpoint(loaded.to(config.device).eval(), postprocessor, samples, settings)


def gate_checkpoint(
    source: ModelFolder,
    cfg: DictConfig,
    quantizer: JudgedQuantizer,
    settings: AccuracyGateSettings,
    policy: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
) -> GateResult:
    """``gated_checkpoint`` for one quantizer."""
    with gated_checkpoint(source, cfg, settings, policy, tokenizer) as gated:
        return gated.judge(quantizer)
