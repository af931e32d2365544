# SPDX-License-Identifier: Apache-2.0
"""What the accuracy gate demands: rules whose thresholds are formulas of the recipe's and the policy's numbers.

All follow from one model. Rounding to nearest with m mantissa bits changes a value by at most half a step, relative
``2**-(m + 1)``; spread evenly over a step, the error's mean square is ``4**-m / 12`` of the value's where rounding is
coarsest. Errors of different operands and products are independent, so their mean squares add up; a product or a norm
hands a relative error on as it is. It is a model: a formula says what a sound recipe stays within on an ordinary
network, not what it reaches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
