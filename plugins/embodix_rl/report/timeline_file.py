# SPDX-License-Identifier: Apache-2.0
"""What the processes of a run did when: spans of activity, one file a process, and what follows from them.

A worker is busy while any of its activities is under way, however many of them; waiting is not one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from embodix.report.json_lines import read_lines

WAIT = "wait"


@dataclass(frozen=True)
class Span:
    """One activity of one worker.

    Attributes:
        worker: the process or component, as ``group:rank`` or ``kind number``.
        activity: what it did or waited for, for example ``step``, ``infer``, ``train``, ``weights``, ``wait``.
        begin_s: seconds, in a run's files of Unix time.
        end_s: seconds.
        whom: it waited for; None where it was busy, and where nobody is named.
    """

    worker: str
    activity: str
    begin_s: float
    end_s: float
    whom: str | None = None

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    @property
    def is_wait(self) -> bool:
        return self.whom is not None or self.activity == WAIT


def kind_of(worker: str) -> str:
    """A worker's name up to the first space or colon: ``env 3`` and ``env:3`` are an ``env``."""
    return worker.replace(":", " ").split(" ")[0]


def union_s(intervals: Iterable[tuple[float, float]], begin_s: float, end_s: float) -> float:
    """Seconds of `begin_s` to `end_s` in which at least one interval is under way."""
    total, covered_to = 0.0, begin_s
    for begin, end in sorted(intervals):
        begin, end = max(begin, covered_to), min(end, end_s)
        if end > begin:
            total += end - begin
            covered_to = end
    return total


def busy_s(spans: Sequence[Span], begin_s: float, end_s: float) -> dict[str, float]:
    """Seconds in which each worker was busy; without those that never were."""
    intervals: dict[str, list[tuple[float, float]]] = {}
    for span in sorted(spans, key=lambda one: one.worker):
        if not span.is_wait:
            intervals.setdefault(span.worker, []).append((span.begin_s, span.end_s))
    busy = {worker: union_s(own, begin_s, end_s) for worker, own in intervals.items()}
    return {worker: seconds for worker, seconds in busy.items() if seconds}


def waited_s(spans: Sequence[Span], begin_s: float, end_s: float) -> dict[str, dict[str, float]]:
    """Seconds that each worker waited, by whom it waited for, of the waits that say so."""
    waited: dict[str, dict[str, float]] = {}
    for span in sorted(spans, key=lambda one: (one.worker, one.begin_s)):
        seconds = min(span.end_s, end_s) - max(span.begin_s, begin_s)
        if span.whom is not None and seconds > 0:
            of_worker = waited.setdefault(span.worker, {})
            of_worker[span.whom] = of_worker.get(span.whom, 0.0) + seconds
    return waited


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
            self.write(Span(self._worker, activity, begin_s, begin_s + time.perf_counter() - begun))

    def write(self, span: Span) -> None:
        """Record a span that is over."""
        fields = {name: value for name, value in asdict(span).items() if value is not None}
        self._file.write(json.dumps(fields, separators=(",", ":")) + "\n")


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
