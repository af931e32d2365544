# SPDX-License-Identifier: Apache-2.0
"""The accuracy gate's verdicts: the rules of ``embodix.quantization.gate_rules`` on a comparison."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from embodix.quantization.accuracy import Comparison, LayerAccuracy, plain_numbers
from embodix.quantization.formulas import evaluate
from embodix.quantization.gate_rules import DEFINITIONS, RULES, Rule

MANTISSA_BITS = {"e4m3": 3, "e5m2": 2, "bfloat16": 7}
Subject = tuple[str, float, dict[str, float]]  # what is judged, its value, numbers of its own


@dataclass(frozen=True)
class RecipeNumbers:
    """What the formulas know of a recipe.

    Attributes:
        mantissa_bits: of the format that weights are rounded to.
        num_operands: what is rounded to it: weights, activations and token embeddings count one each.
        gradient_mantissa_bits: of the format that gradients are rounded to in the backward pass.
        num_gradient_operands: 1 where they are, 0 where they stay in high precision.
    """

    mantissa_bits: int = MANTISSA_BITS["e4m3"]
    num_operands: int = 1
    gradient_mantissa_bits: int = MANTISSA_BITS["e4m3"]
    num_gradient_operands: int = 0

    def __post_init__(self) -> None:
        if min(self.mantissa_bits, self.gradient_mantissa_bits, self.num_operands) < 1:
            raise ValueError(f"A recipe rounds at least one operand to a format with mantissa bits; got {self}.")


@dataclass(frozen=True)
class Verdict:
    """A value against its threshold; ``subject`` is the module, step or dimension, "" where there is one only."""

    subject: str
    value: float
    threshold: float
    passed: bool


@dataclass(frozen=True)
class RuleResult:
    """One rule on everything it judges.

    Attributes:
        formula: in use, the rule's own unless ``overridden``.
        verdicts: in the order of the subjects; none where nothing of the kind was computed.
    """

    rule: Rule
    formula: str
    overridden: bool
    verdicts: list[Verdict]

    @property
    def failing(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if not verdict.passed]

    @property
    def worst(self) -> Verdict | None:
        """The verdict with the least to spare; of ceilings, in units of the ceiling."""
        return min(self.verdicts, key=lambda verdict: (verdict.passed, self._spare(verdict)), default=None)

    def _spare(self, verdict: Verdict) -> float:
        if math.isnan(verdict.value):
            return -math.inf
        if self.rule.bound == "at least":
            return verdict.value - verdict.threshold
        return (verdict.threshold - verdict.value) / (verdict.threshold or 1.0)

    def failure(self) -> str | None:
        """A sentence with rule, value, threshold and formula of the worst verdict; None where all pass."""
        worst = self.worst
        if worst is None or worst.passed:
            return None
        subject = f" ({worst.subject})" if worst.subject else ""
        others = f"; {len(self.failing) - 1} more fail, too" if len(self.failing) > 1 else ""
        return (
            f"{self.rule.name}: {self.rule.quantity}{subject} is {_number(worst.value, self.rule)} and must be "
            f"{self.rule.bound} {_number(worst.threshold, self.rule)} = {self.formula}{others}"
        )


def judge(
    comparison: Comparison, recipe: RecipeNumbers, overrides: Mapping[str, float | str] | None = None
) -> list[RuleResult]:
    """Every rule on a comparison.

    Args:
        overrides: rule -> a number or a formula in place of its own.

    Raises:
        ValueError: an override of an unknown rule, or a formula that can't be evaluated.
    """
    overrides = dict(overrides or {})
    unknown = set(overrides) - {rule.name for rule in RULES}
    if unknown:
        raise ValueError(
            f"gate.thresholds names {', '.join(sorted(unknown))}; the rules are {', '.join(r.name for r in RULES)}."
        )
    numbers = named_numbers(comparison, recipe)
    results = []
    for rule in RULES:
        formula = str(overrides.get(rule.name, rule.formula))
        verdicts = [
            _verdict(rule, subject, value, evaluate(formula, numbers | own))
            for subject, value, own in _subjects(rule.name, comparison)
        ]
        results.append(RuleResult(rule, formula, rule.name in overrides, verdicts))
    return results


def named_numbers(comparison: Comparison, recipe: RecipeNumbers) -> dict[str, float]:
    """What formulas may name; a rule's subjects add their own ``order``, ``step`` and ``unit``."""
    numbers: dict[str, float] = {
        **{name: float(value) for name, value in vars(recipe).items()},
        "num_steps": len(comparison.chunk.cosine_by_step),
        "num_samples": comparison.num_samples,
        "num_dimensions": len(comparison.chunk.dimensions),
        "num_layers": max((layer.order or 0 for layer in comparison.layers), default=0),
        "velocity_power": comparison.loss.velocity_power,
        "loss": comparison.loss.reference,
    }
    for name, formula in DEFINITIONS.items():
        numbers[name] = evaluate(formula, numbers)
    return numbers


def _verdict(rule: Rule, subject: str, value: float, threshold: float) -> Verdict:
    passed = value >= threshold if rule.bound == "at least" else value <= threshold
    return Verdict(subject, value, threshold, passed)


def _subjects(name: str, comparison: Comparison) -> Iterator[Subject]:
    """What a rule judges."""
    chunk = comparison.chunk
    if name == "chunk_cosine":
        yield "", chunk.cosine, {}
    elif name == "worst_cosine":
        yield "", chunk.worst_cosine, {}
    elif name == "step_cosine":
        for step, cosine in enumerate(chunk.cosine_by_step, start=1):
            yield f"step {step} of {len(chunk.cosine_by_step)}", cosine, {"step": step}
    elif name == "denoising_state":
        yield "", sum(dtype != "torch.float32" for dtype in chunk.state_dtypes), {}
    elif name == "protected_modules":
        yield from ((path, 1.0, {}) for path in comparison.outside)
        if not comparison.outside:
            yield "", 0.0, {}
    elif name in ("action_error", "action_rms_error"):
        for dimension in chunk.dimensions:
            error = dimension.largest if name == "action_error" else dimension.rms
            yield dimension.name, error, {"unit": dimension.unit}
    elif name == "loss_change":
        yield "", comparison.loss.relative_change, {}
    else:
        for layer in comparison.layers:
            value = _of_layer(name, layer)
            if value is not None:
                yield layer.path, value, {"order": layer.order or 0}


def _of_layer(name: str, layer: LayerAccuracy) -> float | None:
    values: dict[str, float | None] = {
        "weight_sqnr": layer.weight_db,
        "weight_row_sqnr": layer.weight_row_db,
        "output_sqnr": layer.output_db,
        "gradient_sqnr": layer.output_gradient_db,
        "weight_gradient_sqnr": layer.weight_gradient_db,
    }
    return values[name]


def _number(value: float, rule: Rule) -> str:
    text = f"{value:.6g}" if "cosine" in rule.name else f"{value:.4g}"
    return f"{text} {rule.unit}".rstrip()


def rules_to_json(results: list[RuleResult]) -> list[dict[str, Any]]:
    """The results as rows: the worst subject of each rule, how many there are and fail, and all of them."""
    rows = []
    for result in results:
        worst = result.worst
        row = {
            **{key: getattr(result.rule, key) for key in ("name", "quantity", "unit", "bound", "derivation")},
            "formula": result.formula,
            "overridden": result.overridden,
            "num_judged": len(result.verdicts),
            "num_failing": len(result.failing),
            "subject": worst.subject if worst else None,
            "value": worst.value if worst else None,
            "threshold": worst.threshold if worst else None,
            "verdicts": [dataclasses.asdict(verdict) for verdict in result.verdicts],
        }
        rows.append(plain_numbers(row))
    return rows
