# SPDX-License-Identifier: Apache-2.0
"""A quantized checkpoint as one self-contained HTML page: verdict, sizes, accuracy, formats, modules, provenance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from embodix.report import quantization_wording as wording
from embodix.report.html import page_environment, provenance_texts
from embodix.report.quantization_plots import denoising_figure, layers_figure, rule, yardstick_words


def render_quantization(record: Mapping[str, Any]) -> str:
    """The page as text.

    Args:
        record: the content of ``quantize.json``; without ``gate``, sizes and modules alone.
    """
    environment = page_environment()
    environment.filters |= {"number": wording.number, "decibels": wording.decibels, "cosine": wording.cosine}
    gate = record.get("gate")
    return environment.get_template("quantization.html.j2").render(
        title=wording.title(record),
        paragraph=wording.what_was_done(record),
        cards=wording.cards(record),
        record=record,
        sizes=record["sizes"],
        gate=gate,
        yardstick=yardstick_words(gate) if gate else "",
        dimensions=_dimensions(gate) if gate else [],
        figures=_figures(gate) if gate else {},
        formats=gate["formats"] if gate else None,
        formats_sentence=wording.formats_sentence(gate["formats"]) if gate and gate["formats"]["rows"] else "",
        converted=_converted(record),
        skipped=_skipped(record),
        provenance=[(label, text) for label, text in provenance_texts(record["provenance"]).items() if text],
        options=json.dumps(record["quantization"].get("options", {}), indent=2),
        glossary=wording.GLOSSARY,
    )


def _figures(gate: Mapping[str, Any]) -> dict[str, Markup | None]:
    layers = layers_figure(gate)
    return {"denoising": Markup(denoising_figure(gate)), "layers": None if layers is None else Markup(layers)}


def _dimensions(gate: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each action dimension with the yardstick's errors and the verdicts on its largest error and its mean."""
    rows = zip(
        gate["comparison"]["chunk"]["dimensions"],
        gate["yardstick"]["chunk"]["dimensions"],
        rule(gate, "action_error")["verdicts"],
        rule(gate, "action_rms_error")["verdicts"],
        strict=True,
    )
    return [{**own, "other": other, "verdict": verdict, "rms_verdict": rms} for own, other, verdict, rms in rows]


def _converted(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The converted modules with what the gate found, where it ran."""
    gate = record.get("gate") or {}
    kernels = {module["path"]: module["kernel"] for module in gate.get("recipe", {}).get("converted", [])}
    layers = {layer["path"]: layer for layer in gate.get("comparison", {}).get("layers", [])}
    return [
        {**module, "kernel": kernels.get(module["path"], ""), "layer": layers.get(module["path"])}
        for module in record["quantization"]["converted"]
    ]


def _skipped(record: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """The other modules by the reason."""
    by_reason: dict[str, list[Mapping[str, Any]]] = {}
    for module in record["quantization"]["skipped"]:
        by_reason.setdefault(module["reason"], []).append(module)
    return by_reason
