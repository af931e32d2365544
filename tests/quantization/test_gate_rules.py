# SPDX-License-Identifier: Apache-2.0
"""The gate's formulas: what they evaluate to, that sound rounding stays within them, and that a broken one does not."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodix.quantization.accuracy import (
    ChunkAccuracy,
    Comparison,
    DimensionError,
    LayerAccuracy,
    LossAccuracy,
    sqnr_db,
    worst_row_sqnr_db,
)
from embodix.quantization.gate_rules import RULES, RecipeNumbers, evaluate, judge, named_numbers, rules_to_json
from embodix_fp8.blocks import quantize_blocks

FORMULA = {rule.name: rule.formula for rule in RULES}
NOISE = 4**-3 / 12
WEIGHT_ONLY = RecipeNumbers(mantissa_bits=3, num_operands=1)


def comparison(**changes) -> Comparison:
    """A sound one: a rounding's noise in each layer, far less in the chunk."""
    layers = [
        LayerAccuracy(f"layers.{k}", (8, 8), order=k, weight_db=31.5, weight_row_db=29.0, weight_error=0.026,
                      input_db=math.inf if k == 1 else 30.0, output_db=30.0, output_gradient_db=20.0)
        for k in (1, 2)
    ]  # fmt: skip
    chunk = ChunkAccuracy(
        [0.99999, 0.9999, 0.9998, 0.9997],
        [0.9999, 0.9998, 0.9995, 0.999],
        0.02,
        [DimensionError("x", largest=0.03, rms=0.01, unit=1.0), DimensionError("grip", 0.002, 0.001, 0.05)],
        ["torch.float32"],
    )
    sound = Comparison("float32", "fp8_block", 16, chunk, LossAccuracy(0.1, 0.102, 1.5), layers)
    return dataclasses.replace(sound, **changes)


def failing(changed: Comparison, recipe: RecipeNumbers = WEIGHT_ONLY, overrides=None) -> set[str]:
    return {result.rule.name for result in judge(changed, recipe, overrides) if result.failing}


def test_a_sound_comparison_passes_every_rule():
    results = judge(comparison(), WEIGHT_ONLY)
    assert [result.rule.name for result in results if result.failure()] == []
    judged = {result.rule.name for result in results if result.verdicts}
    assert judged == set(FORMULA) - {"weight_gradient_sqnr"}  # the weights of a quantizer are not trained


def test_the_formulas_have_these_values_for_e4m3():
    numbers = named_numbers(comparison(), WEIGHT_ONLY)
    assert numbers["noise"] == pytest.approx(0.0013021, rel=1e-4)
    own = numbers | {"order": 4.0, "step": 1.0, "unit": 0.5}
    values = {name: evaluate(formula, own) for name, formula in FORMULA.items()}
    assert values["chunk_cosine"] == pytest.approx(0.999349, abs=1e-6)
    assert values["worst_cosine"] == pytest.approx(1 - 1.5 * NOISE)
    assert values["step_cosine"] == pytest.approx(1 - NOISE / 2 / 16)
    assert values["action_error"] == pytest.approx(math.sqrt(2) * 0.5 / 16)  # half a step of 3 mantissa bits
    assert values["action_rms_error"] == pytest.approx(0.5 * math.sqrt(NOISE))
    assert values["weight_sqnr"] == pytest.approx(28.85, abs=0.01)
    assert values["weight_row_sqnr"] == pytest.approx(24.08, abs=0.01)
    assert values["output_sqnr"] == pytest.approx(28.85 - 12.04, abs=0.01)
    assert values["loss_change"] == pytest.approx(15 * NOISE + 2 * math.sqrt(15 * NOISE / 16))
    assert values["gradient_sqnr"] == pytest.approx(-10 * math.log10(15 * NOISE + 16 * NOISE))


def test_the_chunks_cosine_is_never_asked_for_less_than_three_nines():
    rounds_everything = named_numbers(comparison(), RecipeNumbers(2, num_operands=3))
    assert evaluate(FORMULA["chunk_cosine"], rounds_everything) == 0.999
    assert evaluate(FORMULA["step_cosine"], rounds_everything | {"step": 4.0}) == 0.999


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 200),
    st.integers(1, 200),
    st.integers(0, 10**6),
    st.sampled_from([1e-20, 1.0, 1e20]),
    st.sampled_from([(128, 128), (1, 128), (1000, 1000)]),
)
def test_rounding_within_the_formats_range_stays_within_the_weights_formulas(rows, columns, seed, scale, block):
    """Magnitudes over a range of 2**14 are normal e4m3 numbers under one scale: half a step is all they lose."""
    generator = torch.Generator().manual_seed(seed)
    exponents = 14 * torch.rand(rows, columns, generator=generator)
    signs = torch.randint(0, 2, (rows, columns), generator=generator) * 2 - 1
    weight = scale * signs * 2**exponents
    got = quantize_blocks(weight, block).dequantize(torch.float32)
    numbers = named_numbers(comparison(), WEIGHT_ONLY)
    assert worst_row_sqnr_db(weight, got) >= evaluate(FORMULA["weight_row_sqnr"], numbers)
    ordinary = torch.randn(256, 256, generator=generator) * scale
    rounded = quantize_blocks(ordinary, block).dequantize(torch.float32)
    assert sqnr_db(ordinary, rounded) >= evaluate(FORMULA["weight_sqnr"], numbers)


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("weight_sqnr", {"weight_db": 28.0}),
        ("weight_row_sqnr", {"weight_row_db": 24.0}),
        ("output_sqnr", {"output_db": 19.0}),
        ("gradient_sqnr", {"output_gradient_db": 10.0}),
        ("weight_gradient_sqnr", {"weight_gradient_db": 10.0}),
        ("output_sqnr", {"output_db": math.nan}),
        ("weight_sqnr", {"weight_db": -math.inf}),
    ],
)
def test_each_rule_of_a_layer_fails_on_its_own(rule, changes):
    sound = comparison()
    broken = [sound.layers[0], dataclasses.replace(sound.layers[1], **changes)]
    (result,) = [r for r in judge(dataclasses.replace(sound, layers=broken), WEIGHT_ONLY) if r.failing]
    assert result.rule.name == rule
    sentence = result.failure()
    assert sentence.startswith(f"{rule}: ") and "(layers.2)" in sentence and "must be at least" in sentence
    assert sentence.endswith(f"dB = {FORMULA[rule]}")


def test_each_rule_of_the_chunk_fails_on_its_own():
    chunk = comparison().chunk

    def broken(**changes):
        return failing(comparison(chunk=dataclasses.replace(chunk, **changes)))

    assert broken(cosine_by_step=[0.99999, 0.9999, 0.9998, 0.9993]) == {"chunk_cosine", "step_cosine"}
    assert broken(cosine_by_step=[0.9999, 0.9999, 0.9998, 0.9997]) == {"step_cosine"}
    assert broken(worst_by_step=[1.0, 1.0, 1.0, 0.9979]) == {"worst_cosine"}
    assert broken(state_dtypes=["torch.bfloat16"]) == {"denoising_state"}
    assert broken(dimensions=[DimensionError("x", 0.07, 0.01, 1.0)]) == {"action_error"}
    assert broken(dimensions=[DimensionError("x", 0.05, 0.04, 1.0)]) == {"action_rms_error"}
    assert broken(cosine_by_step=[1.0, 1.0, 1.0, math.nan]) == {"chunk_cosine", "step_cosine"}
    assert failing(comparison(loss=LossAccuracy(0.1, 0.2, 1.5))) == {"loss_change"}
    (result,) = [r for r in judge(comparison(outside=["action.a", "action.b"]), WEIGHT_ONLY) if r.failing]
    assert result.rule.name == "protected_modules" and len(result.failing) == 2
    assert "(action.a) is 1 and must be at most 0 = 0; 1 more fail, too" in result.failure()


def test_more_rounded_operands_are_allowed_more_noise():
    changed = comparison(loss=LossAccuracy(0.1, 0.1105, 1.5))
    assert failing(changed) == {"loss_change"}
    assert failing(changed, RecipeNumbers(num_operands=2)) == set()


def test_thresholds_can_be_replaced_by_numbers_and_formulas():
    assert failing(comparison(), overrides={"chunk_cosine": 0.9999}) == {"chunk_cosine"}
    stricter = {"weight_sqnr": "6.02 * mantissa_bits + 14"}
    (result,) = [r for r in judge(comparison(), WEIGHT_ONLY, stricter) if r.failing]
    assert result.overridden and result.worst.threshold == pytest.approx(32.06) and len(result.failing) == 2
    with pytest.raises(ValueError, match=r"names chunk_cosin; the rules are chunk_cosine, worst_cosine"):
        judge(comparison(), WEIGHT_ONLY, {"chunk_cosin": 0.9})
    with pytest.raises(ValueError, match=r"names stp, which is not known here\. Known: .*num_steps"):
        judge(comparison(), WEIGHT_ONLY, {"chunk_cosine": "1 - stp"})


def test_the_rows_for_the_page_show_the_worst_subject():
    changed = comparison()
    layers = [changed.layers[0], dataclasses.replace(changed.layers[1], weight_db=20.0)]
    rows = {row["name"]: row for row in rules_to_json(judge(dataclasses.replace(changed, layers=layers), WEIGHT_ONLY))}
    json.dumps(rows, allow_nan=False)
    weight = rows["weight_sqnr"]
    assert (weight["subject"], weight["value"], weight["num_judged"], weight["num_failing"]) == ("layers.2", 20.0, 2, 1)
    assert rows["weight_gradient_sqnr"]["num_judged"] == 0 and rows["weight_gradient_sqnr"]["value"] is None
    assert rows["step_cosine"]["subject"] == "step 1 of 4"


def test_a_recipe_without_rounding_is_no_recipe():
    with pytest.raises(ValueError, match="rounds at least one operand"):
        RecipeNumbers(num_operands=0)
