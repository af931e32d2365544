# SPDX-License-Identifier: Apache-2.0
"""What the processes of a run did when, one file of spans a process, and where the time of its workers goes.

A worker is busy while any of its activities is under way, however many of them; waiting is not one. Workers record what
they do. What an idle worker waits for is what the work it needs next was doing: an environment needs actions, so it
waits for inference while there is any, else for training (which holds generation back), else for other environments.
The rules are the same for every runner, whatever its workers know of each other.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

from embodix.report.steps import read_lines

WAIT = "wait"
STEP, RESET, INFER, TRAIN, WEIGHTS = "step", "reset", "infer", "train", "weights"
OWN_WORK = (STEP, RESET, INFER, TRAIN)
ACTIVITIES = (*OWN_WORK, WEIGHTS)
ENVIRONMENTS, INFERENCE, TRAINING = "environments", "inference", "training"
COMPONENTS = {"EnvGroup": ENVIRONMENTS, "RolloutGroup": INFERENCE, "ActorGroup": TRAINING}
NOBODY = "messages and scheduling"
_DOES = {STEP: ENVIRONMENTS, RESET: ENVIRONMENTS, INFER: INFERENCE, TRAIN: TRAINING, WEIGHTS: WEIGHTS}
# What an idle worker of a component waits for: the first of these that is under way.
_NEEDS = {
    ENVIRONMENTS: (INFERENCE, TRAINING, WEIGHTS, ENVIRONMENTS),
    INFERENCE: (ENVIRONMENTS, TRAINING, WEIGHTS, INFERENCE),
    TRAINING: (ENVIRONMENTS, INFERENCE, WEIGHTS, TRAINING),
}


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
    spans = [span for file in files for span in read_lines(file, _decode_span, "a span of a timeline")]
    return sorted(spans, key=lambda span: (span.begin_s, span.worker))


def _decode_span(line: bytes) -> Span:
    return Span(**json.loads(line))


@dataclass(frozen=True)
class Piece:
    """A stretch of a worker's time.

    Attributes:
        worker: as in its spans.
        activity: its own, one of `ACTIVITIES`; None while it waits.
        waits_for: a component or ``weights``; ``messages and scheduling`` while nothing it needs was under way; None
            while it is busy.
        begin_s: as in its spans.
        end_s: likewise.
    """

    worker: str
    activity: str | None
    waits_for: str | None
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def component_of(worker: str) -> str:
    """The component that a worker of RLinf's groups belongs to."""
    return COMPONENTS[kind_of(worker)]


def workers_of(spans: Sequence[Span]) -> list[str]:
    """The workers, environments first, training last."""
    order = list(COMPONENTS.values())
    return sorted({span.worker for span in spans}, key=lambda name: (order.index(component_of(name)), name))


def pieces(spans: Sequence[Span], begin_s: float, end_s: float) -> list[Piece]:
    """The whole time of every worker, in pieces; neighbours differ."""
    workers = workers_of(spans)
    last: dict[str, Piece] = {}
    found: list[Piece] = []
    for begin, end, active in _intervals(spans, begin_s, end_s):
        under_way = {worker: _activity(active, worker) for worker in workers}
        for worker in workers:
            activity = under_way[worker]
            waits_for = None if activity else _awaited(worker, under_way)
            before = last.get(worker)
            if before is not None and (before.activity, before.waits_for) == (activity, waits_for):
                last[worker] = Piece(worker, activity, waits_for, before.begin_s, end)
                continue
            if before is not None:
                found.append(before)
            last[worker] = Piece(worker, activity, waits_for, begin, end)
    return sorted([*found, *last.values()], key=lambda piece: (workers.index(piece.worker), piece.begin_s))


def _intervals(
    spans: Sequence[Span], begin_s: float, end_s: float
) -> Iterator[tuple[float, float, Counter[tuple[str, str]]]]:
    """Between two neighbouring begins or ends nothing changes: each such interval, with what is under way."""
    events: dict[float, list[tuple[int, tuple[str, str]]]] = {begin_s: [], end_s: []}
    for span in spans:
        begin, end = max(span.begin_s, begin_s), min(span.end_s, end_s)
        if not span.is_wait and end > begin:
            key = (span.worker, span.activity)
            events.setdefault(begin, []).append((1, key))
            events.setdefault(end, []).append((-1, key))
    active: Counter[tuple[str, str]] = Counter()
    for at, until in pairwise(sorted(events)):
        for change, key in events[at]:
            active[key] += change
        yield at, until, active


def _activity(active: Counter[tuple[str, str]], worker: str) -> str | None:
    return next((activity for activity in ACTIVITIES if active[worker, activity] > 0), None)


def _awaited(worker: str, under_way: dict[str, str | None]) -> str:
    doing = {_DOES[activity] for other, activity in under_way.items() if activity and other != worker}
    return next((need for need in _NEEDS[component_of(worker)] if need in doing), NOBODY)


def shares(timed: Sequence[Piece]) -> dict[str, dict[str, float]]:
    """Of each worker, the share of its time by activity, and by ``waits for ...``."""
    totals: dict[str, Counter[str]] = {}
    for piece in timed:
        label = piece.activity or f"waits for {piece.waits_for}"
        totals.setdefault(piece.worker, Counter())[label] += piece.seconds  # type: ignore[assignment]
    return {
        worker: {label: seconds / sum(own.values()) for label, seconds in sorted(own.items())}
        for worker, own in totals.items()
    }


def component_shares(by_worker: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The mean over the workers of each component."""
    result: dict[str, dict[str, float]] = {}
    for component in COMPONENTS.values():
        own = [share for worker, share in by_worker.items() if component_of(worker) == component]
        labels = sorted({label for share in own for label in share})
        if own:
            result[component] = {label: sum(one.get(label, 0.0) for one in own) / len(own) for label in labels}
    return result
