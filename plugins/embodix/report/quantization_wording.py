# SPDX-License-Identifier: Apache-2.0
"""A quantized policy in words: what was done, the verdict, and the terms used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embodix.report.quantization_plots import rule, yardstick_words
from embodix.report.wording import count, memory, percent

POLICIES = {"pi05": "π0.5", "groot": "GR00T-N1.5"}

GLOSSARY = {
    "FP8, e4m3": "Floating point of 8 bits: a sign, 4 bits of exponent, 3 of mantissa. Rounding to it changes a value "
    "by one part in 16 at most, and by 2.6 % in the root mean square for ordinary weights.",
    "block scaling": "Each 128 × 128 weights share one float32 factor, so that the largest of them is the largest "
    "number of the format.",
    "SQNR": "Signal-to-quantization-noise ratio: the energy of the exact values over that of the error, in decibels. "
    "20 dB is an error of 10 %, 40 dB of 1 %. Errors of earlier layers are included in outputs and gradients.",
    "action chunk": "The actions that the policy predicts at once, after all denoising steps.",
    "cosine": "Of the angle between the chunk with and without quantization, in the policy's normalised units: 1 is "
    "the same direction; 0.999 is an error across it of 4.5 % of the chunk's length.",
    "yardstick": "What bfloat16 does to the same policy on the same samples, against float32.",
    "normalised unit": "What the policy predicts as 1. With quantile or min-max normalisation it is half of the range "
    "of that dimension in the training data.",
}


@dataclass(frozen=True)
class Card:
    """One finding: ``kind`` is good, bad or plain."""

    label: str
    figure: str
    sentence: str
    kind: str


def title(record: Mapping[str, Any]) -> str:
    """The policy and its format."""
    words = format_words(record["quantization"])
    return f"{POLICIES.get(record['policy_type'], record['policy_type'])} in {words['name']}"


def format_words(quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """The format in its quantizer's words (``embodix.contracts.FormatWords``); earlier records have none."""
    known: Mapping[str, Any] | None = quantization.get("format")
    if known is not None:
        return known
    rows, columns = quantization["block"]
    return {
        "name": "FP8",
        "title": f"FP8 (e4m3, one scale for {rows} × {columns})",
        "sentence": f"e4m3, one scale for {rows} × {columns} weights",
    }


def what_was_done(record: Mapping[str, Any]) -> str:
    """One paragraph for a reader who was not there."""
    quantization = record["quantization"]
    written = f", written to {record['output']}" if record.get("output") else ""
    paragraph = (
        f"{record['source']}{written}. {count(len(quantization['converted']), 'module')} of the language model in "
        f"{format_words(quantization)['sentence']}; {len(quantization['skipped'])} in high precision."
    )
    gate = record.get("gate")
    if gate is None:
        return f"{paragraph} What this does to actions was not measured: add --gate."
    samples = gate["samples"]
    return (
        f"{paragraph} Compared with the checkpoint in {gate['comparison']['reference']} on "
        f"{samples['num_samples']} samples of {samples['num_episodes']} episodes ({samples['source']}), from the same "
        "noise."
    )


def cards(record: Mapping[str, Any]) -> list[Card]:
    """Size first, then what the gate found."""
    total = record["sizes"]["total"]
    size = Card(
        "Smaller by",
        percent(total["reduction"], 1),
        f"{memory(total['bytes_before'])} before, {memory(total['bytes_after'])} after, all weights",
        "plain",
    )
    gate = record.get("gate")
    return [size] if gate is None else [_verdict(gate), _chunk(gate), _action(gate), size]


def _verdict(gate: Mapping[str, Any]) -> Card:
    judged = [row for row in gate["rules"] if row["num_judged"]]
    broken = [row for row in judged if row["num_failing"]]
    if gate["passed"]:
        return Card("Accuracy gate", "passed", f"all {len(judged)} rules hold", "good")
    return Card("Accuracy gate", "failed", f"{len(broken)} of {len(judged)} rules are broken", "bad")


def _chunk(gate: Mapping[str, Any]) -> Card:
    row, chunk = rule(gate, "chunk_cosine"), gate["comparison"]["chunk"]
    other = gate["yardstick"]["chunk"]["cosine"]
    return Card(
        "Cosine of the action chunk",
        cosine(chunk["cosine"]),
        f"mean over samples, at least {cosine(row['threshold'])}; worst sample {cosine(chunk['worst_cosine'])}; "
        f"{yardstick_words(gate)} {cosine(other)}",
        "bad" if row["num_failing"] else "good",
    )


def _action(gate: Mapping[str, Any]) -> Card:
    row = rule(gate, "action_error")
    return Card(
        "Action nearest to its limit",
        number(row["value"]),
        f"largest error of {row['subject']}, in its physical unit; at most {number(row['threshold'])}",
        "bad" if row["num_failing"] else "good",
    )


def cosine(value: float | str) -> str:
    """With enough digits to tell it from 1."""
    if isinstance(value, str):
        return value
    distance = 1 - value
    digits = 3 if distance >= 1e-2 else 5 if distance >= 1e-4 else 7
    return f"{value:.{digits}f}"


def number(value: float | str | None, name: str = "") -> str:
    """A value of a rule: cosines with many digits, the rest with four."""
    if value is None:
        return "not computed"
    if isinstance(value, str):
        return value
    return cosine(value) if "cosine" in name else f"{value:.4g}"


def decibels(value: float | str | None) -> str:
    """One digit; words where there is no finite ratio."""
    if value is None:
        return "not computed"
    return value if isinstance(value, str) else f"{value:.1f}"


def formats_sentence(formats: Mapping[str, Any]) -> str:
    """Whether blocks matter for these weights, and from when on they do."""
    rows = {row["format"]: row for row in formats["rows"]}
    tensor, block = rows["per-tensor"], rows["128x128"]
    matters = (
        "One scale a tensor loses noticeably more than blocks do in some layer: blocks matter here."
        if formats["blocks_matter"]
        else "Blocks make no difference to these weights: e4m3 is a floating-point format, and their range fits it."
    )
    return (
        f"{matters} The widest range of a weight, its largest value over its root mean square, is "
        f"{formats['widest_range']:.3g}; one scale a tensor gives a mean error of "
        f"{percent(tensor['weight_error'], 2)}, blocks {percent(block['weight_error'], 2)}. Blocks matter from a range "
        "of about 10 000 on, where one large weight pushes all others out of the format; then they confine the loss to "
        "its block."
    )
