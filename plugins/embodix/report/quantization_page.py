# SPDX-License-Identifier: Apache-2.0
"""A quantized checkpoint for a reader: its page of sizes, accuracy and modules, and its tables in the terminal.

The words for a number format are the quantizer's, in the record under ``quantization.format``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.ticker as ticker
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from embodix.report.drawing import MUTED, drawing, legend, new_figure, series_colour, to_svg
from embodix.report.page import Card, Page, colour, known_provenance
from embodix.report.words import count, memory, percent, quantity

NEUTRAL_FORMAT: Mapping[str, Any] = {
    "name": "low precision",
    "title": "low precision",
    "sentence": "low precision",
    "glossary": {},
}
GLOSSARY = {
    "SQNR": "Signal-to-quantization-noise ratio: the energy of the exact values over that of the error, in decibels. "
    "20 dB is an error of 10 %, 40 dB of 1 %. Errors of earlier layers are included in outputs and gradients.",
    "action chunk": "The actions that the policy predicts at once, after all denoising steps.",
    "cosine": "Of the angle between the chunk with and without quantization, in the policy's normalised units: 1 is "
    "the same direction; 0.999 is an error across it of 4.5 % of the chunk's length.",
    "yardstick": "What bfloat16 does to the same policy on the same samples, against float32.",
    "normalised unit": "What the policy predicts as 1. With quantile or min-max normalisation it is half of the range "
    "of that dimension in the training data.",
}
LOW, YARDSTICK = 1, 0  # series
LAYER_KINDS = (
    ("weight_db", "weight", 1, "o"),
    ("output_db", "output", 2, "s"),
    ("output_gradient_db", "gradient", 3, "^"),
)
FLOOR = 1e-9  # of a cosine's distance from 1, where a step is exact


def render_quantization(record: Mapping[str, Any]) -> str:
    """The page as text.

    Args:
        record: the content of ``quantize.json``; without ``gate``, sizes and modules alone.
    """
    gate = record.get("gate")
    page = Page(
        title=f"{record.get('policy_name', record['policy_type'])} in {_format(record)['name']}",
        paragraph=_paragraph(record),
        provenance=known_provenance(record["provenance"]),
        cards=_cards(record),
        warnings=gate["failures"] if gate else (),
        warnings_title="Why the gate refuses it",
        figures={"denoising": _denoising_figure(gate), "layers": _layers_figure(gate)} if gate else {},
        details=[("Options of the recipe", json.dumps(record["quantization"].get("options", {}), indent=2))],
        glossary={**_format(record)["glossary"], **GLOSSARY},
    )
    return page.render(
        "quantization.html.j2",
        filters={"number": number, "decibels": decibels, "cosine": cosine},
        record=record,
        sizes=record["sizes"],
        gate=gate,
        yardstick=_yardstick(gate) if gate else "",
        dimensions=_dimensions(gate) if gate else [],
        formats=gate["formats"] if gate else {},
        format_name=_format(record)["name"],
        converted=_converted(record),
        skipped=_skipped(record),
    )


def _format(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The words of the quantizer for its format: name, title, sentence, glossary."""
    return {**NEUTRAL_FORMAT, **record["quantization"].get("format", {})}


def _dimensions(gate: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each action dimension with the yardstick's errors and the verdicts on its largest error and its mean."""
    rows = zip(
        gate["comparison"]["chunk"]["dimensions"],
        gate["yardstick"]["chunk"]["dimensions"],
        _rule(gate, "action_error")["verdicts"],
        _rule(gate, "action_rms_error")["verdicts"],
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


def _paragraph(record: Mapping[str, Any]) -> str:
    """One paragraph for a reader who was not there."""
    quantization = record["quantization"]
    written = f", written to {record['output']}" if record.get("output") else ""
    paragraph = (
        f"{record['source']}{written}. {count(len(quantization['converted']), 'module')} of the language model in "
        f"{_format(record)['sentence']}; {len(quantization['skipped'])} in high precision."
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


def _cards(record: Mapping[str, Any]) -> list[Card]:
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
    row, chunk = _rule(gate, "chunk_cosine"), gate["comparison"]["chunk"]
    other = gate["yardstick"]["chunk"]["cosine"]
    return Card(
        "Cosine of the action chunk",
        cosine(chunk["cosine"]),
        f"mean over samples, at least {cosine(row['threshold'])}; worst sample {cosine(chunk['worst_cosine'])}; "
        f"{_yardstick(gate)} {cosine(other)}",
        colour(not row["num_failing"]),
    )


def _action(gate: Mapping[str, Any]) -> Card:
    row = _rule(gate, "action_error")
    return Card(
        "Action nearest to its limit",
        number(row["value"]),
        f"largest error of {row['subject']}, in its physical unit; at most {number(row['threshold'])}",
        colour(not row["num_failing"]),
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


def _denoising_figure(gate: Mapping[str, Any]) -> str:
    """One minus the cosine after each denoising step, with the rule's threshold and the yardstick."""
    chunk, yardstick = gate["comparison"]["chunk"], gate["yardstick"]["chunk"]
    thresholds = [verdict["threshold"] for verdict in _rule(gate, "step_cosine")["verdicts"]]
    name, other = gate["comparison"]["got"], _yardstick(gate)
    with drawing():
        figure, axes = new_figure(2.9)
        _distance(axes, chunk["worst_by_step"], series_colour(LOW), f"{name}, worst sample", (0, (1, 1.5)))
        _distance(axes, chunk["cosine_by_step"], series_colour(LOW), f"{name}, mean", "-")
        _distance(axes, yardstick["cosine_by_step"], series_colour(YARDSTICK), f"{other}, mean", "-")
        _distance(axes, thresholds, MUTED, "most that is allowed, mean", (0, (4, 3)))
        axes.set(xlabel="denoising step", ylabel="1 − cosine", yscale="log")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        legend(axes, 2)
        return to_svg(figure, "denoising")


def _distance(axes: Axes, cosines: Sequence[float], colour: str, label: str, style: Any) -> None:
    steps = range(1, len(cosines) + 1)
    distances = [max(1 - cosine, FLOOR) for cosine in cosines]
    axes.plot(steps, distances, color=colour, label=label, linestyle=style, marker="o", markersize=4, linewidth=1.6)


def _layers_figure(gate: Mapping[str, Any]) -> str | None:
    """SQNR of weight, output and gradient of every computed layer in the order of computation; None without layers."""
    layers = sorted((layer for layer in gate["comparison"]["layers"] if layer["order"]), key=lambda x: x["order"])
    if not layers:
        return None
    other = {layer["path"]: layer for layer in gate["yardstick"]["layers"]}
    with drawing():
        figure, axes = new_figure(3.2)
        for key, label, series, marker in LAYER_KINDS:
            _points(axes, layers, key, series_colour(series), label, marker)
        _points(axes, [other[layer["path"]] for layer in layers], "output_db", series_colour(YARDSTICK),
                f"output, {_yardstick(gate)}", "s")  # fmt: skip
        limits = {verdict["subject"]: verdict["threshold"] for verdict in _rule(gate, "output_sqnr")["verdicts"]}
        drawn = [(layer["order"], limits[layer["path"]]) for layer in layers if layer["path"] in limits]
        axes.plot(*zip(*drawn, strict=True), color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label="least, output")
        axes.set(xlabel="converted layer, in the order of computation", ylabel="SQNR, dB")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        legend(axes, 5)
        return to_svg(figure, "layers")


def _points(axes: Axes, layers: Sequence[Mapping[str, Any]], key: str, colour: str, label: str, marker: str) -> None:
    """Layers whose ratio is a number: neither exact, nor lost, nor not computed."""
    points = [(layer["order"], layer[key]) for layer in layers if isinstance(layer[key], (int, float))]
    if points:
        axes.plot(*zip(*points, strict=True), marker, color=colour, label=label, markersize=4.5, alpha=0.9)


def _yardstick(gate: Mapping[str, Any]) -> str:
    """The yardstick by the name of what it adds to the reference: bfloat16."""
    return str(gate["yardstick"]["got"])


def _rule(gate: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A rule's row."""
    found: Mapping[str, Any] = next(row for row in gate["rules"] if row["name"] == name)
    return found


def print_quantization(record: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the record of ``lerobot quantize``.

    Args:
        record: the content of ``quantize.json``.
    """
    console = console or Console()
    console.print(f"[bold]{record['policy_type']}[/]: {record['source']}", highlight=False, soft_wrap=True)
    console.print(_size_table(record["sizes"]))
    console.print(_definition_table(record["sizes"]["definitions"]))
    for sentence in _sentences(record):
        console.print(sentence, highlight=False, soft_wrap=True)


def print_quantizations(records: Mapping[str, Mapping[str, Any]], console: Console | None = None) -> None:
    """Print several records of ``lerobot quantize`` as one table, a row each."""
    table = Table(title="Bytes of the weights, by job", title_justify="left")
    table.add_column("job", overflow="fold")
    for column in ("modules", "before", "after", "saved", "gate"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, record in records.items():
        _, _, before, after, saved = _row(record["sizes"]["total"])
        gate = "" if record["gate"] is None else "passed" if record["gate"]["passed"] else "failed"
        table.add_row(name, str(len(record["quantization"]["converted"])), before, after, saved, gate)
    (console or Console()).print(table)


def _size_table(sizes: Mapping[str, Any]) -> Table:
    """Bytes before and after by part."""
    table = Table(title="Bytes of the weights, before and after", title_justify="left")
    table.add_column("part")
    for column in ("parameters", "before", "after", "saved"):
        table.add_column(column, justify="right", no_wrap=True)
    for part in sizes["parts"]:
        table.add_row(*_row(part))
    table.add_section()
    table.add_row(*_row(sizes["total"]), style="bold")
    return table


def _row(part: Mapping[str, Any]) -> tuple[str, ...]:
    before, after = part["bytes_before"], part["bytes_after"]
    saved = percent(1 - after / before, 1) if after != before else ""
    return part["part"], quantity(part["num_parameters"]), memory(before), memory(after) if after else "dropped", saved


def _definition_table(definitions: list[Mapping[str, Any]]) -> Table:
    table = Table(
        title="The same policy, all of it in bfloat16 before: what is quantized, of what", title_justify="left"
    )
    table.add_column("quantized")
    for column in ("before", "after", "saved"):
        table.add_column(column, justify="right", no_wrap=True)
    for definition in definitions:
        before, after = memory(definition["bytes_before"]), memory(definition["bytes_after"])
        table.add_row(definition["name"], before, after, percent(definition["reduction"], 1))
    return table


def _sentences(record: Mapping[str, Any]) -> list[str]:
    quantization = record["quantization"]
    converted, skipped = quantization["converted"], quantization["skipped"]
    sentences = [
        f"{count(len(converted), 'module')} in {_format(record)['title']}; {len(skipped)} in high precision, each with "
        "its reason in quantize.json."
    ]
    noise = [module["sqnr_db"] for module in converted if isinstance(module.get("sqnr_db"), float)]
    if noise:
        sentences.append(f"Signal to quantization noise of the weights: {min(noise):.1f} to {max(noise):.1f} dB.")
    if quantization["dropped"]:
        names = ", ".join(tensor["name"] for tensor in quantization["dropped"])
        sentences.append(f"Dropped, as nothing reads them: {names}.")
    if record["gate"]:
        gate = record["gate"]
        verdict = "passed" if gate["passed"] else "failed"
        num_judged = sum(row["num_judged"] > 0 for row in gate["rules"])
        sentences.append(f"Accuracy gate {verdict}: {count(num_judged, 'rule')} judged, each in quantize.json.")
    if "output" in record:
        output = record["output"]
        sentences.append(f"Written: {output}. Evaluate it as the original: lerobot eval checkpoint={output}")
    if "language_model" in record:
        sentences.append(_language_model_sentence(record["language_model"], _format(record)["name"]))
    return sentences


def _language_model_sentence(exported: Mapping[str, Any], format_name: str) -> str:
    ragged = exported["in_high_precision"]
    kept = f"; {count(len(ragged), 'layer')} in high precision, no multiple of the block" if ragged else ""
    return (
        f"Language model alone: {exported['folder']} ({exported['architecture']} of transformers, "
        f"{exported['num_quantized']} layers in {format_name}, the rest in {exported['dtype']}{kept})."
    )
