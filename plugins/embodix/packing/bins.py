# SPDX-License-Identifier: Apache-2.0
"""Pack samples into bins of bounded cost: first-fit decreasing, and best-fit over a look-ahead window.

Both take every sample exactly once, keep to the order of the samples within a window, and are functions of their
arguments alone. Shape suffixes: N samples in the order of an epoch, K bins, D kinds (distinct cost and image counts).
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np

from embodix.packing.sample_cost import FloatArray, IntArray

MAX_UNITS = 2**20  # budgets above it are counted in coarser units, samples rounded up
TOLERANCES = (1 / 200, 1 / 1000, 1 / 4096, 0.0)  # of the budget; the coarsest keeps nearest to the order
NUM_TRIED = 2048  # samples that the choice of a tolerance is tried on
NUM_LEVELLED = 64  # bins at the end of an epoch that share what is too little to fill them all
_UNLIMITED = 2**62


@dataclass(frozen=True)
class Limits:
    """What one bin may hold at most.

    Raises:
        ValueError: a limit below one.
    """

    budget: float
    max_samples: int | None = None
    max_images: int | None = None

    def __post_init__(self) -> None:
        limits = {"budget": self.budget, "max_samples": self.max_samples, "max_images": self.max_images}
        wrong = [f"{name}={value}" for name, value in limits.items() if value is not None and value < 1]
        if wrong:
            raise ValueError(f"Limits of a bin are 1 or more; got {', '.join(wrong)}.")


@dataclass(frozen=True)
class Bins:
    """A sequence of bins.

    Attributes:
        samples_N: int64 samples, bin after bin.
        ends_K: int64 end of each bin in ``samples_N``.
    """

    samples_N: IntArray
    ends_K: IntArray

    def __len__(self) -> int:
        return int(self.ends_K.size)

    def __getitem__(self, index: int) -> IntArray:
        start = int(self.ends_K[index - 1]) if index else 0
        return self.samples_N[start : int(self.ends_K[index])]

    @property
    def num_samples(self) -> IntArray:
        """``[K]`` samples of each bin."""
        return np.diff(self.ends_K, prepend=0)

    def sums(self, values: FloatArray) -> FloatArray:
        """``[K]`` sum of a value over each bin; ``values`` is indexed by sample."""
        starts_K = self.ends_K - self.num_samples
        return np.add.reduceat(np.asarray(values, dtype=np.float64)[self.samples_N], starts_K)


def require_fitting(samples_N: IntArray, costs_N: FloatArray, images_N: IntArray, limits: Limits) -> None:
    """Refuse samples that no bin can hold.

    Raises:
        ValueError: the first such sample with its size and the limit.
    """
    worst = int(costs_N.argmax())
    if costs_N[worst] > limits.budget:
        raise ValueError(
            f"Sample {samples_N[worst]} alone costs {costs_N[worst]:g}, more than a bin's budget of "
            f"{limits.budget:g}. Raise packing.options.budget (or rows) to {int(np.ceil(costs_N[worst]))} at least, "
            "or train.batch_size where it is null, or leave the sample out."
        )
    worst = int(images_N.argmax())
    if limits.max_images is not None and images_N[worst] > limits.max_images:
        raise ValueError(
            f"Sample {samples_N[worst]} alone has {images_N[worst]} images, more than max_images="
            f"{limits.max_images}. Raise packing.options.max_images."
        )


def whole_units(costs_N: FloatArray, budget: float) -> tuple[IntArray, int]:
    """Costs and budget as whole numbers: tokens stay exact, other costs are rounded up to a fine unit."""
    if budget <= MAX_UNITS and np.array_equal(costs_N, np.floor(costs_N)):
        return costs_N.astype(np.int64), int(budget)
    unit = budget / 2**16
    units_N = np.maximum(np.ceil(costs_N / unit - 1e-9), 1).astype(np.int64)
    return np.minimum(units_N, 2**16), 2**16


def best_fit(
    samples_N: IntArray, costs_N: FloatArray, images_N: IntArray, limits: Limits, look_ahead: int = 256
) -> Bins:
    """Fill one bin after the other, each beginning with the oldest sample that waits.

    Of the samples in view the next one is the first after which some combination of sizes can still fill the bin, to
    within a tolerance; those passed over wait for the next bins. Where none is in view, the largest that fits is
    taken. The tolerance is the one of ``TOLERANCES`` that fills the bins of the first ``NUM_TRIED`` samples best.

    Args:
        samples_N: dataset indices in the order of the epoch.
        costs_N, images_N: cost and images of each of them.
        look_ahead: samples that may wait.

    Raises:
        ValueError: a sample that no bin can hold.
    """
    require_fitting(samples_N, costs_N, images_N, limits)
    trials = {t: _fill(costs_N[:NUM_TRIED], images_N[:NUM_TRIED], limits, look_ahead, t)[1] for t in TOLERANCES}
    tolerance = min(trials, key=lambda tried: len(trials[tried]))
    taken, ends = _fill(costs_N, images_N, limits, look_ahead, tolerance)
    positions = Bins(np.array(taken, dtype=np.int64), np.array(ends, dtype=np.int64))
    positions = level_end(positions, costs_N, images_N, limits)
    return Bins(samples_N[positions.samples_N], positions.ends_K)


def _fill(
    costs_N: FloatArray, images_N: IntArray, limits: Limits, look_ahead: int, tolerance: float
) -> tuple[list[int], list[int]]:
    """Positions in the order in which they are taken, and the end of each bin."""
    filler, ends = _BinFiller(costs_N, images_N, limits, look_ahead, tolerance), []
    while filler.fill_bin():
        ends.append(len(filler.taken))
    return filler.taken, ends


class _BinFiller:
    """Takes positions one by one; written for speed, since it visits every sample of an epoch."""

    def __init__(
        self, costs_N: FloatArray, images_N: IntArray, limits: Limits, look_ahead: int, tolerance: float
    ) -> None:
        units_N, self._budget = whole_units(costs_N, limits.budget)
        base = int(images_N.max()) + 1
        kinds_D, kind_N = np.unique(units_N * base + images_N, return_inverse=True)
        self._cost: list[int] = (kinds_D // base).tolist()
        self._images: list[int] = (kinds_D % base).tolist()
        self._kind: list[int] = kind_N.tolist()
        self._slack: list[int] = unfillable_rest(np.unique(kinds_D // base), self._budget).tolist()
        self._tolerance = int(self._budget * tolerance)
        self._smallest = min(self._cost)
        self._max_samples = limits.max_samples or _UNLIMITED
        self._max_images = _UNLIMITED if limits.max_images is None else limits.max_images
        self._look_ahead = look_ahead
        self._next = 0
        self._waiting: dict[int, deque[int]] = {}  # positions by kind, oldest first
        self._by_age: deque[int] = deque()  # all that waited, those taken since included
        self._num_waiting = 0
        self._is_taken = bytearray(len(self._kind))
        self.taken: list[int] = []

    def fill_bin(self) -> bool:
        """Take the samples of one bin; False when none is left."""
        position = self._oldest()
        room, images, samples = self._budget, self._max_images, self._max_samples
        if position is None:
            return False
        while position is not None:
            self._is_taken[position] = 1
            self.taken.append(position)
            kind = self._kind[position]
            room, images, samples = room - self._cost[kind], images - self._images[kind], samples - 1
            if room < self._smallest or not samples:
                break
            position = self._fitting(room, images)
        return True

    def _oldest(self) -> int | None:
        while self._by_age:
            position = self._by_age.popleft()
            if not self._is_taken[position]:
                return self._pop(self._kind[position])  # the oldest of all is the oldest of its kind
        if self._next == len(self._kind):
            return None
        self._next += 1
        return self._next - 1

    def _fitting(self, room: int, images: int) -> int | None:
        cost, num_images, slack, kinds = self._cost, self._images, self._slack, self._kind
        accepted = max(self._tolerance, slack[room])
        for kind in self._waiting:
            rest = room - cost[kind]
            if rest >= 0 and slack[rest] <= accepted and num_images[kind] <= images:
                return self._pop(kind)
        for position in range(self._next, min(len(kinds), self._next + self._look_ahead - self._num_waiting)):
            kind = kinds[position]
            rest = room - cost[kind]
            if rest >= 0 and slack[rest] <= accepted and num_images[kind] <= images:
                self._next = position + 1
                return position
            if kind in self._waiting:
                self._waiting[kind].append(position)
            else:
                self._waiting[kind] = deque((position,))
            self._by_age.append(position)
            self._num_waiting += 1
            self._next = position + 1
        fitting = [kind for kind in self._waiting if cost[kind] <= room and num_images[kind] <= images]
        return self._pop(max(fitting, key=cost.__getitem__)) if fitting else None

    def _pop(self, kind: int) -> int:
        line = self._waiting[kind]
        position = line.popleft()
        if not line:
            del self._waiting[kind]
        self._num_waiting -= 1
        return position


def level_end(positions: Bins, costs_N: FloatArray, images_N: IntArray, limits: Limits) -> Bins:
    """The same bins, with the samples of the last ``NUM_LEVELLED`` dealt out evenly among them.

    Otherwise the last bin of an epoch holds what is left over, and the rank that gets it waits for the others. Nothing
    changes where an even bin would break a limit.
    """
    first = max(0, len(positions) - NUM_LEVELLED)
    start = int(positions.ends_K[first - 1]) if first else 0
    last = positions.samples_N[start:]
    heap = [(0.0, index) for index in range(len(positions) - first)]
    members: list[list[int]] = [[] for _ in heap]
    for position in last[np.argsort(-costs_N[last], kind="stable")].tolist():
        load, index = heapq.heappop(heap)
        members[index].append(position)
        heapq.heappush(heap, (load + float(costs_N[position]), index))
    dealt = sorted((sorted(bin_) for bin_ in members), key=lambda bin_: bin_[0])
    counts = np.array([len(bin_) for bin_ in dealt], dtype=np.int64)
    samples_N = np.concatenate([positions.samples_N[:start], *map(np.asarray, dealt)])
    levelled = Bins(samples_N, np.concatenate([positions.ends_K[:first], start + np.cumsum(counts)]))
    return levelled if _within(levelled, costs_N, images_N, limits) else positions


def _within(bins: Bins, costs_N: FloatArray, images_N: IntArray, limits: Limits) -> bool:
    """Whether every bin keeps every limit."""
    most_samples, most_images = limits.max_samples or _UNLIMITED, limits.max_images or _UNLIMITED
    kept = bins.sums(costs_N).max() <= limits.budget and bins.num_samples.max() <= most_samples
    return bool(kept and bins.sums(images_N.astype(np.float64)).max() <= most_images)


def unfillable_rest(costs_D: IntArray, budget: int) -> IntArray:
    """``[budget + 1]``: how much of each amount stays empty at least, whatever combination of the costs fills it.

    Reachable sums are the bits of one large integer, so that a cost is added to all of them by a shift.
    """
    reachable, mask = 1, (1 << (budget + 1)) - 1
    for cost in costs_D.tolist():
        shift = cost
        while shift <= budget:
            reachable |= (reachable << shift) & mask
            shift *= 2
    packed = np.frombuffer(reachable.to_bytes((budget + 8) // 8, "little"), dtype=np.uint8)
    is_reachable = np.unpackbits(packed, bitorder="little")[: budget + 1].astype(bool)
    amounts = np.arange(budget + 1)
    filled: IntArray = np.maximum.accumulate(np.where(is_reachable, amounts, 0))
    return amounts - filled


def first_fit_decreasing(
    samples_N: IntArray, costs_N: FloatArray, images_N: IntArray, limits: Limits, look_ahead: int = 4096
) -> Bins:
    """Pack ``look_ahead`` samples at a time, largest first, each into the first bin that holds it.

    Samples of one kind are placed together, which gives the same bins. The emptiest bin of a window is opened again
    for the next one. Bins come out in the order of their oldest sample.

    Raises:
        ValueError: a sample that no bin can hold.
    """
    require_fitting(samples_N, costs_N, images_N, limits)
    units_N, budget = whole_units(costs_N, limits.budget)
    num_samples, start = len(samples_N), 0
    left_over: IntArray = np.empty(0, dtype=np.int64)
    order, counts = [], []
    while start < num_samples:
        new = np.arange(start, min(start + max(1, look_ahead - left_over.size), num_samples))
        start = int(new[-1]) + 1
        window = np.concatenate([left_over, new])
        bin_W = _first_fit_of_window(units_N[window], images_N[window], budget, limits)
        bins = _by_oldest(window, bin_W)
        left_over = np.empty(0, dtype=np.int64)
        if start < num_samples and len(bins) > 1:
            left_over = bins.pop(int(np.argmin([units_N[members].sum() for members in bins])))
        order += bins
        counts += [members.size for members in bins]
    return Bins(samples_N[np.concatenate(order)], np.cumsum(counts, dtype=np.int64))


def _first_fit_of_window(units_W: IntArray, images_W: IntArray, budget: int, limits: Limits) -> IntArray:
    """Bin of each sample of a window (W samples)."""
    by_size = np.lexsort((images_W, -units_W))
    kinds = np.stack([units_W, images_W], axis=1)[by_size]
    runs = np.split(by_size, np.flatnonzero(np.any(np.diff(kinds, axis=0), axis=1)) + 1)
    full = np.array([budget, limits.max_images or _UNLIMITED, limits.max_samples or _UNLIMITED], dtype=np.int64)
    room_K3: IntArray = np.empty((0, 3), dtype=np.int64)
    bin_W = np.empty(units_W.size, dtype=np.int64)
    for run in runs:
        need_3 = np.array([units_W[run[0]], images_W[run[0]], 1], dtype=np.int64)
        uses = need_3 > 0
        fits_K = (room_K3[:, uses] // need_3[uses]).min(axis=1)
        placed_K = np.clip(run.size - (np.cumsum(fits_K) - fits_K), 0, fits_K)
        num_missing = run.size - int(placed_K.sum())
        a_bin = int((full[uses] // need_3[uses]).min())
        opened = np.full(-(-num_missing // a_bin), a_bin, dtype=np.int64)
        if opened.size:
            opened[-1] = num_missing - a_bin * (opened.size - 1)
        room_K3 = np.concatenate([room_K3, np.tile(full, (opened.size, 1))])
        placed_K = np.concatenate([placed_K, opened])
        room_K3 -= placed_K[:, None] * need_3
        bin_W[run] = np.repeat(np.arange(placed_K.size), placed_K)
    return bin_W


def _by_oldest(window: IntArray, bin_W: IntArray) -> list[IntArray]:
    """Members of each bin in their order, bins in the order of their oldest member."""
    grouped = np.argsort(bin_W, kind="stable")
    members = np.split(window[grouped], np.flatnonzero(np.diff(bin_W[grouped])) + 1)
    return sorted(members, key=lambda positions: int(positions[0]))
