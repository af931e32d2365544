# SPDX-License-Identifier: Apache-2.0
"""Write a benchmark's result as JSON and Markdown with provenance, or refuse."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embodix.report.manifest import Provenance, collect_provenance, write_text_atomically

_COMMIT = re.compile(r"[0-9a-f]{40}")


def write_benchmark(path_stem: Path | str, result: Mapping[str, Any], allow_dirty: bool = False) -> tuple[Path, Path]:
    """Write ``<path_stem>.json`` and ``<path_stem>.md``; returns both paths.

    The Markdown follows the order of ``result``: ``title`` becomes the heading, a string a paragraph, a mapping of
    scalars a two-column table, a list of mappings a table with their keys as columns, any other mapping a section.

    Args:
        path_stem: target without suffix; ``benchmarks/results/<name>`` for figures that the project quotes.
        result: plain containers, strings and numbers, ready for JSON.
        allow_dirty: write although the tree differs from its commit or the commit is unknown, and say so in both
            files. For trying a script out; such a figure is not quotable.

    Raises:
        ValueError: the tree is dirty or the commit unknown, and ``allow_dirty`` is not given.
    """
    provenance = require_quotable(allow_dirty)
    problem = _not_reproducible(provenance)
    stem = Path(path_stem)
    json_path, markdown_path = stem.with_name(stem.name + ".json"), stem.with_name(stem.name + ".md")
    document = {**result, "provenance": dataclasses.asdict(provenance)}
    if problem:
        document["not_quotable"] = problem
    write_text_atomically(json_path, json.dumps(document, indent=2) + "\n")
    write_text_atomically(markdown_path, _markdown(result, provenance, problem))
    return json_path, markdown_path


def require_quotable(allow_dirty: bool = False) -> Provenance:
    """The provenance of this process; a script calls it before it measures, so that minutes are not lost.

    Raises:
        ValueError: the tree is dirty or the commit unknown, and ``allow_dirty`` is not given.
    """
    provenance = collect_provenance()
    problem = _not_reproducible(provenance)
    if problem and not allow_dirty:
        raise ValueError(
            f"A benchmark result names the commit that produced it; got {problem}. "
            "Commit the changes and run again, or pass allow_dirty=True for a figure that is not to be quoted."
        )
    return provenance


def _not_reproducible(provenance: Provenance) -> str | None:
    if not _COMMIT.fullmatch(provenance.commit):
        return f"no commit ({provenance.commit}: {provenance.commit_source})"
    if provenance.dirty:
        return f"uncommitted changes on top of {provenance.commit[:12]}"
    return None


def _markdown(result: Mapping[str, Any], provenance: Provenance, problem: str | None) -> str:
    parts = [f"# {result.get('title', 'Benchmark')}"]
    if problem:
        parts.append(f"**Not quotable:** {problem}.")
    parts += [_block(key, value, level=2) for key, value in result.items() if key != "title"]
    parts.append(_block("provenance", _provenance_rows(provenance), level=2))
    return "\n\n".join(parts) + "\n"


def _provenance_rows(provenance: Provenance) -> dict[str, Any]:
    rows = dataclasses.asdict(provenance)
    versions = rows.pop("versions")
    return {key: value for key, value in rows.items() if value not in (None, [])} | {
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items())
    }


def _block(key: str, value: Any, level: int) -> str:
    """One entry of the result as Markdown, with its key as heading."""
    heading = f"{'#' * level} {key.replace('_', ' ').capitalize()}\n\n"
    if isinstance(value, Mapping):
        if any(isinstance(item, Mapping) or _is_rows(item) for item in value.values()):
            return heading + "\n\n".join(_block(name, item, level + 1) for name, item in value.items())
        return heading + _table(("", "value"), [(name.replace("_", " "), item) for name, item in value.items()])
    if _is_rows(value):
        columns = list(dict.fromkeys(column for row in value for column in row))
        return heading + _table(
            [column.replace("_", " ") for column in columns],
            [[row.get(column) for column in columns] for row in value],
        )
    return heading + _cell(value)


def _is_rows(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(_cell(item) for item in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_cell(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_cell(item)}" for name, item in value.items())
    return str(value).replace("|", "\\|")
