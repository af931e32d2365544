# SPDX-License-Identifier: Apache-2.0
"""What the processes of a run did when: spans of activity, one file a process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from embodix.report.json_lines import read_lines


@dataclass(frozen=True)
class Span:
    """One activity of one process.

    Attributes:
        worker: the process, as ``group:rank``.
        activity: what it did, for example ``step``, ``infer``, ``train``, ``weights``, ``wait``.
        begin_s: Unix time.
        end_s: Unix time.
    """

    worker: str
    activity: str
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class TimelineWriter:
    """Writes the spans of one process as they end, so that a killed process leaves what it did."""

    def __init__(self, folder: Path | str, worker: str) -> None:
        path = Path(folder) / f"{worker.replace(':', '_')}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._worker = worker
        self._file: IO[str] = path.open("a", buffering=1)

    @contextmanager
    def span(self, activity: str) -> Iterator[None]:
        """Record what the block takes."""
        begin_s, begun = time.time(), time.perf_counter()
        try:
            yield
        finally:
            span = Span(self._worker, activity, begin_s, begin_s + time.perf_counter() - begun)
            self._file.write(json.dumps(asdict(span), separators=(",", ":")) + "\n")


def read_timeline(folder: Path | str) -> list[Span]:
    """The spans of all processes, in the order in which they began.

    Raises:
        FileNotFoundError: no timeline in the folder.
        ValueError: a file that is none.
    """
    files = sorted(Path(folder).glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"No timeline in {folder}; `lerobot rl` writes one into its run folder.")
    spans = [span for file in files for span in read_lines(file, _decode, "a span of a timeline")]
    return sorted(spans, key=lambda span: (span.begin_s, span.worker))


def _decode(line: bytes) -> Span:
    return Span(**json.loads(line))
