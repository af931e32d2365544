# SPDX-License-Identifier: Apache-2.0
"""Records that a run adds to one at a time, one JSON object a line.

A run that is killed may leave half a line at the end of its file. Reading drops it, appending cuts it off first, so a
resumed run continues the same file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

BAD_LINE = (ValueError, KeyError, TypeError)


def append_line(path: Path | str, fields: Mapping[str, Any], decode: Callable[[bytes], Any]) -> None:
    """Add one record to the end of a file, creating it (and its folder) if needed.

    Args:
        decode: makes a record of a line, raising ValueError, KeyError or TypeError for a partial one.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        _mend_tail(file, decode)
        file.write((json.dumps(fields, separators=(",", ":")) + "\n").encode())


def read_lines[Record](path: Path | str, decode: Callable[[bytes], Record], what: str) -> list[Record]:
    """Every record of an existing file, in its order; an incomplete last line is dropped.

    Args:
        what: what a line is, with its article, for the error.

    Raises:
        ValueError: a line other than an incomplete last one is no such record.
    """
    lines = Path(path).read_bytes().split(b"\n")
    last = len(lines) - 1  # empty when the file ends in a newline
    records = []
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            records.append(decode(line))
        except BAD_LINE as error:
            if number == last:
                break  # the tail of a killed run
            raise ValueError(
                f"{path}, line {number + 1} is not {what} ({type(error).__name__}: {error}). "
                "Only the last line of a killed run may be incomplete; remove the line, or read another run."
            ) from error
    return records


def _mend_tail(file: Any, decode: Callable[[bytes], Any]) -> None:
    """Make an open file end in a newline: complete a whole last record, cut off a partial one."""
    content_end = file.seek(0, 2)
    if content_end == 0:
        return
    file.seek(content_end - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    content = file.read()
    line_start = content.rfind(b"\n") + 1
    try:
        decode(content[line_start:])
    except BAD_LINE:
        file.truncate(line_start)
    else:
        file.write(b"\n")
