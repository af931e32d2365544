# SPDX-License-Identifier: Apache-2.0
"""What the accuracy gate demands, as formulas of the recipe's and the policy's numbers, and its verdicts.

All follow from one model. Rounding to nearest with m mantissa bits changes a value by at most half a step, relative
``2**-(m + 1)``; spread evenly over a step, the error's mean square is ``4**-m / 12`` of the value's where rounding is
coarsest. Errors of different operands and products are independent, so their mean squares add up; a product or a norm
hands a relative error on as it is. It is a model: a formula says what a sound recipe stays within on an ordinary
network, not what it reaches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from embodix.quantization.accuracy import Comparison, LayerAccuracy, plain_numbers
from embodix.quantization.formulas import evaluate

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


# Named parts of the formulas, in the order in which they are evaluated.
DEFINITIONS = {
    "noise": "num_operands * 4**-mantissa_bits / 12",
    "gradient_noise": "num_gradient_operands * 4**-gradient_mantissa_bits / 12",
    "loss_noise": "noise * velocity_power / loss",
}


@dataclass(frozen=True)
class Rule:
    """One demand.

    Attributes:
        name: by which ``gate.thresholds`` replaces its formula.
        quantity: what is judged, in words.
        unit: of value and threshold, "" for none.
        bound: whether the threshold is a floor or a ceiling.
        formula: of the threshold.
        derivation: why that formula.
    """

    name: str
    quantity: str
    unit: str
    bound: Literal["at least", "at most"]
    formula: str
    derivation: str


RULES = (
    Rule(
        "chunk_cosine",
        "cosine of the action chunk, mean over samples",
        "",
        "at least",
        "max(0.999, 1 - noise / 2)",
        "The whole denoising loop may cost the chunk no more than rounding the chunk itself once to the format: a "
        "relative error e with e**2 = noise, and 1 - e**2 / 2 is the cosine to first order. Never below 0.999.",
    ),
    Rule(
        "worst_cosine",
        "cosine of the action chunk, worst sample",
        "",
        "at least",
        "1 - 3 * noise / 2",
        "No sample may be further off than if every rounding error were as large as it can be: half a step, whose "
        "square is 3 times the mean square of an error spread evenly over the step.",
    ),
    Rule(
        "step_cosine",
        "cosine of the denoising state, mean over samples, worst step",
        "",
        "at least",
        "max(0.999, 1 - noise / 2 * (step / num_steps)**2)",
        "Denoising starts from the same noise and moves by 1 / num_steps of the velocity in each step. All steps read "
        "the same rounded language model, so their errors have one sign at worst and add up: after k steps k / "
        "num_steps of the final error.",
    ),
    Rule(
        "denoising_state",
        "denoising states that are not float32",
        "",
        "at most",
        "0",
        "Rounding the state itself would add an error in every step.",
    ),
    Rule(
        "protected_modules",
        "modules outside the language model that are not in high precision",
        "",
        "at most",
        "0",
        "Vision tower, connector and action head stay as they are: what the action head loses enters every denoising "
        "step, and no attention over many tokens averages it out.",
    ),
    Rule(
        "action_error",
        "largest error of an action dimension",
        "physical units",
        "at most",
        "sqrt(3 * noise * num_dimensions) * unit",
        "A sample may be off by sqrt(3 * noise) of its chunk's length (worst_cosine). At worst all of that lies in one "
        "dimension, spread over the steps; lengths are taken at one normalised unit for each action.",
    ),
    Rule(
        "action_rms_error",
        "root mean square error of an action dimension",
        "physical units",
        "at most",
        "sqrt(noise) * unit",
        "What rounding the action itself once to the format would do at one normalised unit.",
    ),
    Rule(
        "loss_change",
        "change of the loss, relative",
        "",
        "at most",
        "loss_noise + 2 * sqrt(loss_noise / num_samples)",
        "The loss is the mean square of velocity minus target. A velocity error of mean square noise * velocity_power "
        "adds itself, and twice its product with the residual, at most 2 * sqrt(loss_noise) of the loss in a sample, "
        "with a sign that averages out over samples.",
    ),
    Rule(
        "weight_sqnr",
        "SQNR of a layer's weight",
        "dB",
        "at least",
        "-10 * log10(4**-mantissa_bits / 12)",
        "The mean square error of one rounding. Bell-shaped weights reach about 2.7 dB more, since most lie above the "
        "lower edge of their binade.",
    ),
    Rule(
        "weight_row_sqnr",
        "SQNR of the weights of one output, worst row",
        "dB",
        "at least",
        "-10 * log10(4**-(mantissa_bits + 1))",
        "No rounding error exceeds half a step, so a row falls below this only where its values have fallen under the "
        "format's range: a scale that a far larger weight has set.",
    ),
    Rule(
        "output_sqnr",
        "SQNR of a layer's output",
        "dB",
        "at least",
        "-10 * log10(4 * noise * order)",
        "Each of the converted modules up to this one adds the noise of one product. A gated MLP multiplies two "
        "projections of the same input, so that the input's relative error doubles: four times its mean square. Loose "
        "in a deep model, where residual streams dilute errors: there the action chunk decides.",
    ),
    Rule(
        "gradient_sqnr",
        "SQNR of the loss's gradient at a layer's output",
        "dB",
        "at least",
        "-10 * log10(loss_noise + 4 * (2 * noise + gradient_noise) * num_layers)",
        "The gradient starts from the residual, whose relative mean square error is loss_noise, and passes each "
        "product at most once forward and once backward; 4 as for the outputs.",
    ),
    Rule(
        "weight_gradient_sqnr",
        "SQNR of the gradient of a layer's weight",
        "dB",
        "at least",
        "-10 * log10(loss_noise + 4 * (2 * noise + gradient_noise) * (num_layers + 1))",
        "The gradient at the output, times the input in one more product.",
    ),
)


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
