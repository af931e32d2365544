# SPDX-License-Identifier: Apache-2.0
"""A quantized checkpoint in the terminal: sizes by part, what was converted, and what the percentages mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from embodix.report.quantization_wording import format_words
from embodix.report.wording import count, memory, percent, quantity


def print_quantization(record: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the record of ``lerobot quantize``.

    Args:
        record: the content of ``quantize.json``.
    """
    console = console or Console()
    console.print(f"[bold]{record['policy_type']}[/]: {record['source']}", highlight=False, soft_wrap=True)
    console.print(size_table(record["sizes"]))
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


def size_table(sizes: Mapping[str, Any]) -> Table:
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
    words = format_words(quantization)
    sentences = [
        f"{count(len(converted), 'module')} in {words['title']}; {len(skipped)} in high precision, each with "
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
        sentences.append(_language_model_sentence(record["language_model"]))
    return sentences


def _language_model_sentence(exported: Mapping[str, Any]) -> str:
    ragged = exported["in_high_precision"]
    kept = f"; {count(len(ragged), 'layer')} in high precision, no multiple of the block" if ragged else ""
    return (
        f"Language model alone: {exported['folder']} ({exported['architecture']} of transformers, "
        f"{exported['num_quantized']} layers quantized, the rest in {exported['dtype']}{kept})."
    )
