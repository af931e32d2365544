# SPDX-License-Identifier: Apache-2.0
"""Records that a run adds to one at a time, one JSON object a line, and the record of one training step.

A run that is killed may leave half a line at the end of its file. Reading drops it, appending cuts it off first, so a
resumed run continues the same file. A step that is trained again after a resume replaces its first record.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES = ("data_wait", "preprocess", "forward", "backward", "optimizer")
BAD_LINE = (ValueError, KeyError, TypeError)


@dataclass(frozen=True)
class TokenRecord:
    """Token and image counts of one step, summed over the batch (prefix and action tokens).

    Attributes:
        valid: tokens that carry input.
        computed: tokens this run put through the transformer.
        upstream: tokens that upstream's padded layout computes for the same samples.
        images_computed: images this run put through the vision tower.
        images_upstream: images upstream puts through it, blank ones included.
    """

    valid: int
    computed: int
    upstream: int
    images_computed: int
    images_upstream: int


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, over all ranks and micro-batches.

    Attributes:
        step: 1 for the first step of a run.
        loss: the loss that was differentiated: mean over ranks. NaN and infinities of older files are kept as they are.
        grad_norm: norm of the gradients that the optimizer takes, before clipping; the same on all ranks.
        lr: learning rate of the first parameter group; the same on all ranks.
        num_samples: samples of the step: sum over ranks.
        wall_s: seconds of wall-clock time by phase, of the main process; phases are named in ``PHASES``.
        cpu_s: seconds of process CPU time by phase, of the main process alone.
        tokens: token counts: sums over ranks, or None where the run has no way to count them.
        action_valid: action elements inside the episode: sum over ranks, or None when not counted.
        action_total: action elements in the batch, padding included: sum over ranks, or None when not counted.

    Raises:
        ValueError: a phase that is not in ``PHASES``.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    num_samples: int
    wall_s: dict[str, float]
    cpu_s: dict[str, float]
    tokens: TokenRecord | None = None
    action_valid: int | None = None
    action_total: int | None = None

    def __post_init__(self) -> None:
        unknown = sorted((set(self.wall_s) | set(self.cpu_s)) - set(PHASES))
        if unknown:
            raise ValueError(f"A step is timed by the phases {', '.join(PHASES)}; got also {', '.join(unknown)}.")


def append_step(path: Path | str, record: StepRecord) -> None:
    """Add one record to the end of a step file, creating it (and its folder) if needed."""
    append_line(path, dataclasses.asdict(record), _decode)


def read_steps(path: Path | str) -> list[StepRecord]:
    """Read a step file, ordered by step; of two records of one step the later line counts.

    Raises:
        FileNotFoundError: no such file; the message says what writes it.
        ValueError: a line other than an incomplete last one is not a step record.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"No step records at {path}. `lerobot train` writes steps.jsonl into its output_dir; "
            "give the folder of a run that trained at least one step."
        )
    by_step = {record.step: record for record in read_lines(path, _decode, "a step record")}
    return [by_step[step] for step in sorted(by_step)]


def _decode(line: bytes) -> StepRecord:
    fields: Mapping[str, Any] = json.loads(line)
    tokens = fields.get("tokens")
    return StepRecord(**{**fields, "tokens": None if tokens is None else TokenRecord(**tokens)})


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
