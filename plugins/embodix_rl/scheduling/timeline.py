# SPDX-License-Identifier: Apache-2.0
"""Who did what when, and what follows from it: busy shares, who waited for whom, fresh frames per second, the bound.

Records of a simulated run on its loop's clock; those of real runs are in `embodix_rl.report.spans`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from embodix_rl.report.spans import Span, busy_s, kind_of, waited_s


@dataclass(frozen=True)
class TrainedBatch:
    """A global batch whose optimizer step is done.

    Attributes:
        at: when.
        version: that its training began with.
        frames: environment frames it trained on, masked ones left out.
        fresh_frames: those that no batch before it had trained on.
        staleness: samples by the versions between their generation and this batch.
    """

    at: float
    version: int
    frames: int
    fresh_frames: int
    staleness: Mapping[int, int]


@dataclass
class Timeline:
    """Records of a run.

    Attributes:
        spans, batches: the records, in the order of their ends.
        discarded_frames: generated and never trained.
    """

    spans: list[Span] = field(default_factory=list)
    batches: list[TrainedBatch] = field(default_factory=list)
    discarded_frames: int = 0

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @contextmanager
    def busy(self, who: str, what: str) -> Iterator[None]:
        """`who` does `what` within the context."""
        begin = self.now()
        try:
            yield
        finally:
            self.spans.append(Span(who, what, begin, self.now()))

    @contextmanager
    def wait(self, who: str, whom: str, what: str) -> Iterator[None]:
        """`who` waits for `whom` within the context, whose end somebody else guards."""
        begin = self.now()
        try:
            yield
        finally:
            if self.now() > begin:
                self.spans.append(Span(who, what, begin, self.now(), whom))

    def trained(self, version: int, frames: int, fresh_frames: int, staleness: Mapping[int, int]) -> None:
        """An optimizer step is done."""
        self.batches.append(TrainedBatch(self.now(), version, frames, fresh_frames, dict(staleness)))


@dataclass(frozen=True)
class TimelineSummary:
    """What a timeline says about the batches after warm-up.

    Attributes:
        seconds: the interval, from the end of the last batch of warm-up to the end of the last batch.
        fresh_frames_per_s: frames that were trained for the first time.
        frames_per_s: with repetitions.
        reuse_factor: how often a frame was trained.
        discarded_share: of the frames of the whole run that were trained or discarded.
        staleness: samples by their age in versions.
        busy_share: of each component, of the interval.
        waited_s: who waited for whom, for how long.
        parts_s: busy seconds a batch of each kind of component, the busiest of its kind.
        bound_s: the largest of these: no schedule of the same parts is faster a batch.
        bound_share: the bound over what a batch of fresh frames took.
    """

    seconds: float
    fresh_frames_per_s: float
    frames_per_s: float
    reuse_factor: float
    discarded_share: float
    staleness: dict[int, int]
    busy_share: dict[str, float]
    waited_s: dict[str, dict[str, float]]
    parts_s: dict[str, float]
    bound_s: float
    bound_share: float


def summarize(timeline: Timeline, warm_up_batches: int = 1) -> TimelineSummary:
    """The summary of a run; kinds of components are those of `embodix_rl.report.spans.kind_of`.

    Args:
        timeline: of the whole run.
        warm_up_batches: global batches at the beginning that do not count.

    Raises:
        ValueError: no batch after warm-up.
    """
    batches = timeline.batches
    if warm_up_batches < 1 or len(batches) <= warm_up_batches:
        raise ValueError(
            f"A summary needs at least one batch of warm-up and one after it; got {warm_up_batches} of {len(batches)}."
        )
    begin, end = batches[warm_up_batches - 1].at, batches[-1].at
    counted = batches[warm_up_batches:]
    frames, fresh = sum(batch.frames for batch in counted), sum(batch.fresh_frames for batch in counted)
    busy = busy_s(timeline.spans, begin, end)
    num_fresh_batches = len(counted) * fresh / frames if frames else 0.0
    parts: dict[str, float] = {}
    for who, seconds in busy.items():
        kind = kind_of(who)
        parts[kind] = max(parts.get(kind, 0.0), seconds / num_fresh_batches if num_fresh_batches else 0.0)
    bound_s = max(parts.values(), default=0.0)
    trained = sum(batch.fresh_frames for batch in batches)
    return TimelineSummary(
        seconds=end - begin,
        fresh_frames_per_s=fresh / (end - begin),
        frames_per_s=frames / (end - begin),
        reuse_factor=frames / fresh if fresh else 0.0,
        discarded_share=timeline.discarded_frames / max(timeline.discarded_frames + trained, 1),
        staleness=dict(sorted(sum((Counter(batch.staleness) for batch in counted), Counter()).items())),
        busy_share={who: seconds / (end - begin) for who, seconds in busy.items()},
        waited_s=waited_s(timeline.spans, begin, end),
        parts_s=parts,
        bound_s=bound_s,
        bound_share=bound_s * num_fresh_batches / (end - begin),
    )
