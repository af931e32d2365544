# SPDX-License-Identifier: Apache-2.0
"""What the accuracy gate demands: rules, what they judge, and thresholds that are formulas; and its verdicts.

All formulas follow from one model. Rounding to nearest with m mantissa bits changes a value by at most half a step,
relative ``2**-(m + 1)``; spread evenly over a step, the error's mean square is ``4**-m / 12`` of the value's where
rounding is coarsest. Errors of different operands and products are independent, so their mean squares add up; a product
or a norm hands a relative error on as it is. It is a model: a formula says what a sound recipe stays within on an
ordinary network, not what it reaches.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from embodix.quantization.accuracy import Comparison, plain_numbers

FUNCTIONS: dict[str, Callable[..., float]] = {
    "abs": abs,
    "exp": math.exp,
    "log10": math.log10,
    "max": max,
    "min": min,
    "sqrt": math.sqrt,
}
# Named parts of the formulas, in the order in which they are evaluated.
DEFINITIONS = {
    "noise": "num_operands * 4**-mantissa_bits / 12",
    "gradient_noise": "num_gradient_operands * 4**-gradient_mantissa_bits / 12",
    "loss_noise": "noise * velocity_power / loss",
}
ARITHMETIC = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Load, ast.Constant),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd),
)
Subject = tuple[str, float, dict[str, float]]  # what is judged, its value, numbers of its own


def evaluate(formula: str | float, numbers: Mapping[str, float]) -> float:
    """The value of a formula of numbers, names, ``+ - * / **``, parentheses and ``FUNCTIONS``.

    Raises:
        ValueError: anything else in it, an unknown name (with those that are known), or no finite value.
    """
    try:
        tree = ast.parse(str(formula).strip(), mode="eval")
        _require_arithmetic(tree, numbers)
        value = float(_computed(tree, numbers))
    except (SyntaxError, ArithmeticError, TypeError) as error:
        raise ValueError(f"The formula {formula!r} can't be evaluated: {error}.") from error
    if not math.isfinite(value):
        raise ValueError(f"The formula {formula!r} has no finite value with {dict(numbers)}.")
    return value


def _require_arithmetic(tree: ast.Expression, numbers: Mapping[str, float]) -> None:
    """Nothing but arithmetic of what is known; its constants become floats, so that no power of whole numbers grows."""
    functions = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in FUNCTIONS:
            raise ValueError(f"Formulas know the functions {', '.join(FUNCTIONS)}; got {node.func.id}.")
        if isinstance(node, ast.Name) and id(node) not in functions and node.id not in numbers:
            known = ", ".join(sorted(numbers))
            raise ValueError(f"The formula names {node.id}, which is not known here. Known: {known}.")
        is_number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
        refused = (isinstance(node, ast.Constant) and not is_number) or (isinstance(node, ast.Call) and node.keywords)
        if refused or not isinstance(node, ARITHMETIC):
            raise ValueError(
                f"A formula has numbers, names, + - * / **, parentheses and {', '.join(FUNCTIONS)}; got "
                f"{ast.unparse(node)!r}."
            )
        if isinstance(node, ast.Constant):
            node.value = float(node.value)  # type: ignore[arg-type]


def _computed(tree: ast.Expression, numbers: Mapping[str, float]) -> Any:
    try:
        return eval(compile(tree, "<formula>", "eval"), {"__builtins__": {}}, {**numbers, **FUNCTIONS})
    except ValueError as error:  # math's, outside of a function's domain
        raise ArithmeticError(str(error)) from error


@dataclass(frozen=True)
class Rule:
    """One demand.

    Attributes:
        name: by which ``gate.thresholds`` replaces its formula.
        quantity: what is judged, in words.
        unit: of value and threshold, "" for none.
        bound: whether the threshold is a floor or a ceiling.
        judged: its subjects in a comparison; none where nothing of the kind was computed.
        formula: of the threshold.
        derivation: why that formula.
    """

    name: str
    quantity: str
    unit: str
    bound: Literal["at least", "at most"]
    judged: Callable[[Comparison], list[Subject]]
    formula: str
    derivation: str


def _whole(value: Callable[[Comparison], float]) -> Callable[[Comparison], list[Subject]]:
    """One value of the comparison."""
    return lambda comparison: [("", value(comparison), {})]


def _each_layer(measure: str) -> Callable[[Comparison], list[Subject]]:
    """Every layer of which this was measured."""
    return lambda comparison: [
        (layer.path, getattr(layer, measure), {"order": layer.order or 0})
        for layer in comparison.layers
        if getattr(layer, measure) is not None
    ]


def _each_dimension(measure: str) -> Callable[[Comparison], list[Subject]]:
    return lambda comparison: [
        (dimension.name, getattr(dimension, measure), {"unit": dimension.unit})
        for dimension in comparison.chunk.dimensions
    ]


def _each_step(comparison: Comparison) -> list[Subject]:
    cosines = comparison.chunk.cosine_by_step
    return [(f"step {step} of {len(cosines)}", cosine, {"step": step}) for step, cosine in enumerate(cosines, start=1)]


def _each_outside(comparison: Comparison) -> list[Subject]:
    return [(path, 1.0, {}) for path in comparison.outside] or [("", 0.0, {})]


RULES = (
    Rule(
        "chunk_cosine",
        "cosine of the action chunk, mean over samples",
        "",
        "at least",
        _whole(lambda comparison: comparison.chunk.cosine),
        "max(0.999, 1 - noise / 2)",
        "The whole denoising loop may cost the chunk no more than rounding the chunk itself once to the format: a "
        "relative error e with e**2 = noise, and 1 - e**2 / 2 is the cosine to first order. Never below 0.999.",
    ),
    Rule(
        "worst_cosine",
        "cosine of the action chunk, worst sample",
        "",
        "at least",
        _whole(lambda comparison: comparison.chunk.worst_cosine),
        "1 - 3 * noise / 2",
        "No sample may be further off than if every rounding error were as large as it can be: half a step, whose "
        "square is 3 times the mean square of an error spread evenly over the step.",
    ),
    Rule(
        "step_cosine",
        "cosine of the denoising state, mean over samples, worst step",
        "",
        "at least",
        _each_step,
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
        _whole(lambda comparison: sum(dtype != "torch.float32" for dtype in comparison.chunk.state_dtypes)),
        "0",
        "Rounding the state itself would add an error in every step.",
    ),
    Rule(
        "protected_modules",
        "modules outside the language model that are not in high precision",
        "",
        "at most",
        _each_outside,
        "0",
        "Vision tower, connector and action head stay as they are: what the action head loses enters every denoising "
        "step, and no attention over many tokens averages it out.",
    ),
    Rule(
        "action_error",
        "largest error of an action dimension",
        "physical units",
        "at most",
        _each_dimension("largest"),
        "sqrt(3 * noise * num_dimensions) * unit",
        "A sample may be off by sqrt(3 * noise) of its chunk's length (worst_cosine). At worst all of that lies in one "
        "dimension, spread over the steps; lengths are taken at one normalised unit for each action.",
    ),
    Rule(
        "action_rms_error",
        "root mean square error of an action dimension",
        "physical units",
        "at most",
        _each_dimension("rms"),
        "sqrt(noise) * unit",
        "What rounding the action itself once to the format would do at one normalised unit.",
    ),
    Rule(
        "loss_change",
        "change of the loss, relative",
        "",
        "at most",
        _whole(lambda comparison: comparison.loss.relative_change),
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
        _each_layer("weight_db"),
        "-10 * log10(4**-mantissa_bits / 12)",
        "The mean square error of one rounding. Bell-shaped weights reach about 2.7 dB more, since most lie above the "
        "lower edge of their binade.",
    ),
    Rule(
        "weight_row_sqnr",
        "SQNR of the weights of one output, worst row",
        "dB",
        "at least",
        _each_layer("weight_row_db"),
        "-10 * log10(4**-(mantissa_bits + 1))",
        "No rounding error exceeds half a step, so a row falls below this only where its values have fallen under the "
        "format's range: a scale that a far larger weight has set.",
    ),
    Rule(
        "output_sqnr",
        "SQNR of a layer's output",
        "dB",
        "at least",
        _each_layer("output_db"),
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
        _each_layer("output_gradient_db"),
        "-10 * log10(loss_noise + 4 * (2 * noise + gradient_noise) * num_layers)",
        "The gradient starts from the residual, whose relative mean square error is loss_noise, and passes each "
        "product at most once forward and once backward; 4 as for the outputs.",
    ),
    Rule(
        "weight_gradient_sqnr",
        "SQNR of the gradient of a layer's weight",
        "dB",
        "at least",
        _each_layer("weight_gradient_db"),
        "-10 * log10(loss_noise + 4 * (2 * noise + gradient_noise) * (num_layers + 1))",
        "The gradient at the output, times the input in one more product.",
    ),
)


@dataclass(frozen=True)
class RecipeNumbers:
    """What the formulas know of a recipe.

    Attributes:
        mantissa_bits: of the format that weights are rounded to.
        num_operands: what is rounded to it: weights, activations and token embeddings count one each.
        gradient_mantissa_bits: of the format that gradients are rounded to in the backward pass.
        num_gradient_operands: 1 where they are, 0 where they stay in high precision.
    """

    mantissa_bits: int = 3
    num_operands: int = 1
    gradient_mantissa_bits: int = 3
    num_gradient_operands: int = 0

    def __post_init__(self) -> None:
        if min(self.mantissa_bits, self.gradient_mantissa_bits, self.num_operands) < 1:
            raise ValueError(f"A recipe rounds at least one operand to a format with mantissa bits; got {self}.")


@dataclass(frozen=True)
class RuleVerdict:
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
    verdicts: list[RuleVerdict]

    @property
    def failing(self) -> list[RuleVerdict]:
        return [verdict for verdict in self.verdicts if not verdict.passed]

    @property
    def worst(self) -> RuleVerdict | None:
        """The verdict with the least to spare; of ceilings, in units of the ceiling."""
        return min(self.verdicts, key=lambda verdict: (verdict.passed, self._spare(verdict)), default=None)

    def _spare(self, verdict: RuleVerdict) -> float:
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
            for subject, value, own in rule.judged(comparison)
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


def _verdict(rule: Rule, subject: str, value: float, threshold: float) -> RuleVerdict:
    passed = value >= threshold if rule.bound == "at least" else value <= threshold
    return RuleVerdict(subject, value, threshold, passed)


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
