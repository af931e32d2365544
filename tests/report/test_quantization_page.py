# SPDX-License-Identifier: Apache-2.0
"""The page of a quantized checkpoint: what it must say when the gate passes, when it refuses, and without a gate."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from embodix.quantization.accuracy import ChunkAccuracy, Comparison, DimensionError, LayerAccuracy, LossAccuracy
from embodix.quantization.accuracy_gate import GateResult
from embodix.quantization.gate_rules import RecipeNumbers, judge, named_numbers
from embodix.report.quantization_page import cosine, decibels, number, render_quantization
from embodix_fp8.format_words import FORMAT, formats_sentence, side_by_side_words

LAYERS = ["model.<language>.layers.0.q_proj", "model.<language>.layers.0.down_proj"]
SKIPPED = [("model.vision.fc1", "vision tower: always in high precision"), ("model.head", "action head: always")]


def comparison(chunk_cosine: float = 0.99995, got: str = "fp8_block") -> Comparison:
    layers = [
        LayerAccuracy(LAYERS[0], (128, 96), 1, 31.5, 29.0, 0.026, float("inf"), 31.0, 22.0),
        LayerAccuracy(LAYERS[1], (96, 256), None, 31.6, 29.1, 0.026),
    ]
    chunk = ChunkAccuracy(
        [0.999999, chunk_cosine],
        [0.99999, chunk_cosine - 0.0004],
        0.01,
        [DimensionError("delta_x", 0.0171, 0.0026, 1.0), DimensionError("grip", 0.004, 0.001, 0.1)],
        ["torch.float32"],
    )
    return Comparison("float32", got, 64, chunk, LossAccuracy(0.06174, 0.06201, 1.37), layers)


def gate(chunk_cosine: float = 0.99995, **thresholds: Any) -> dict[str, Any]:
    compared, numbers = comparison(chunk_cosine), RecipeNumbers()
    rows = [
        {"format": name, "weight_error": error, "worst_weight_error": error, "worst_path": LAYERS[0],
         "product_error": 0.0188, "product_error_fp8": 0.0258, "zeroed": 0.0001, "bytes_a_weight": 1.0012}
        for name, error in (("per-tensor", 0.0266), ("per-row", 0.0262), ("128x128", 0.0267))
    ]  # fmt: skip
    formats = {"rows": rows, "num_layers": 1, "widest_range": 4.0, "blocks_matter": False}
    return GateResult(
        comparison=compared,
        yardstick=dataclasses.replace(comparison(0.9999905), reference="float32", got="bfloat16"),
        recipe={
            "name": "fp8_block",
            "fallback": None,
            "converted": [{"path": p, "kernel": "dequantize"} for p in LAYERS],
        },
        numbers=named_numbers(compared, numbers),
        rules=judge(compared, numbers, thresholds),
        samples="data/demo: 12 episodes that training left out",
        num_episodes=12,
        formats={**formats, **side_by_side_words(formats)},
    ).to_json()


def record(gated: dict[str, Any] | None) -> dict[str, Any]:
    parts = [
        {"part": "decoder's linear layers", "num_parameters": 2**20, "bytes_before": 2**22, "bytes_after": 2**20},
        {"part": "unused vocabulary heads", "num_parameters": 2**18, "bytes_before": 2**20, "bytes_after": 0},
    ]
    total = {"part": "all", "num_parameters": 2**20 + 2**18, "bytes_before": 5 * 2**20, "bytes_after": 2**20}
    return {
        "title": "pi05: run",
        "source": "outputs/run",
        "output": "outputs/small",
        "policy_type": "pi05",
        "policy_name": "π0.5",
        "quantization": {
            "format": FORMAT,
            "block": [128, 128],
            "options": {"activations": "auto"},
            "converted": [{"path": path, "kind": "language_linear", "shape": [128, 96]} for path in LAYERS],
            "skipped": [{"path": path, "kind": "x", "shape": [8, 8], "reason": why} for path, why in SKIPPED],
            "dropped": [{"name": "lm_head.weight", "shape": [1024, 96]}],
        },
        "sizes": {"parts": parts, "total": {**total, "reduction": 0.8}, "definitions": []},
        "gate": gated,
        "provenance": {"commit": "abc123", "dirty": False, "versions": {"torch": "2.10.0"}},
    }


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<svg.*?</svg>|<[^>]+>", " ", page, flags=re.DOTALL))


@pytest.fixture(scope="module")
def page() -> str:
    return render_quantization(record(gate()))


def test_the_page_stands_alone(page):
    assert "<script" not in page and not re.search(r'(src|href)="http', page)
    assert page.count("<svg") == 2 and "var(--series-1)" in page


def test_it_says_what_was_measured(page):
    text = text_of(page)
    assert "π0.5 in FP8" in text and "outputs/run, written to outputs/small" in text
    assert "2 modules of the language model in e4m3, one scale for 128 × 128 weights; 2 in high precision" in text
    assert "on 64 samples of 12 episodes (data/demo: 12 episodes that training left out)" in text
    assert "Accuracy gate passed all 12 rules hold" in text
    assert "0.9999500 mean over samples, at least 0.99935; worst sample 0.99955; bfloat16 0.9999905" in text
    assert "Action nearest to its limit 0.004 largest error of grip, in its physical unit; at most 0.008839" in text
    assert "Smaller by 80.0 % 5 MiB before, 1 MiB after" in text


def test_every_rule_stands_with_its_formula_and_reason(page):
    text = text_of(page)
    assert "max(0.999, 1 - noise / 2)" in text and "noise = num_operands * 4**-mantissa_bits / 12" in text
    assert "holds 2 of 2 31.5 at least 28.85 -10 * log10(4**-mantissa_bits / 12)" in text
    assert text.count("nothing of the kind was computed") == 1  # gradients of weights


def test_sizes_modules_and_formats(page):
    text = text_of(page)
    assert "unused vocabulary heads 262 k 1 MiB dropped 100.0 %" in text
    assert "model.&lt;language&gt;.layers.0.q_proj 128 × 96 dequantize 31.5 exact 31.0 22.0" in text
    assert "31.6 not computed not computed not computed" in text
    assert "1 stay as they are. vision tower: always in high precision model.vision.fc1 8 × 8" in text
    assert "1 dropped: nothing reads them lm_head.weight 1024 × 96" in text
    assert "128 × 128 2.67 %" in text and "Blocks make no difference to these weights" in text


def test_a_refusal_says_why():
    text = text_of(render_quantization(record(gate(0.9985))))
    assert "Accuracy gate failed 2 of 12 rules are broken" in text
    assert "chunk_cosine: cosine of the action chunk, mean over samples is 0.9985 and must be at least 0.999349" in text
    assert "fails 1 of 2" in text  # of the two denoising steps


def test_a_replaced_threshold_is_said():
    text = text_of(render_quantization(record(gate(chunk_cosine=0.9985, weight_sqnr=35))))
    assert "35 set by gate.thresholds" in text


def test_without_a_gate_it_says_that_nothing_was_measured():
    page = render_quantization(record(None))
    text = text_of(page)
    assert "What this does to actions was not measured: add --gate." in text
    assert "Rules of the gate" not in text and "<svg" not in page
    assert "2 in FP8" in text


def test_without_the_quantizers_words_the_page_names_no_format():
    bare = record(gate())
    del bare["quantization"]["format"], bare["policy_name"]
    bare["gate"]["formats"].pop("columns")
    text = text_of(render_quantization(bare))
    assert "pi05 in low precision" in text and "2 modules of the language model in low precision;" in text
    assert "Accuracy gate passed all 12 rules hold" in text
    assert not re.search("FP8|e4m3|Formats side by side", text)


def test_numbers_keep_the_digits_that_matter():
    assert [cosine(value) for value in (0.98, 0.99935, 0.9999618)] == ["0.980", "0.99935", "0.9999618"]
    assert cosine("not a number") == "not a number"
    assert [number(value) for value in (None, "exact", 0.123456)] == ["not computed", "exact", "0.1235"]
    assert [decibels(value) for value in (None, "lost", 31.04)] == ["not computed", "lost", "31.0"]


def test_the_sentence_says_when_blocks_matter():
    formats = gate()["formats"]
    assert "Blocks make no difference to these weights" in formats_sentence(formats)
    wide = {**formats, "blocks_matter": True, "widest_range": 3e5}
    assert "blocks matter here" in formats_sentence(wide) and "is 3e+05" in formats_sentence(wide)
