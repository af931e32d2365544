# SPDX-License-Identifier: Apache-2.0
"""In which order samples are read: a pure function of (seed, epoch), known before any worker starts.

An order names dataset indices only, so that batches, packs and ranks can be cut from it, and a run can be taken up at
any position, whatever the number of processes or workers. A shuffle in windows also knows which files a sample is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class SampleOrder(Protocol):
    """An endless series of epochs.

    Attributes:
        num_draws: samples an epoch.
    """

    num_draws: int

    def epoch(self, epoch: int) -> np.ndarray:
        """int64 dataset indices of one epoch, ``[num_draws]``; the same for the same seed and epoch."""
        ...


class ShuffledOrder:
    """Every sample once an epoch, in an order of its own each epoch.

    Raises:
        ValueError: no samples.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        if num_samples < 1:
            raise ValueError(f"An order needs one sample at least; got num_samples={num_samples}.")
        self.num_draws = num_samples
        self._seed = seed

    def epoch(self, epoch: int) -> np.ndarray:
        """A permutation of all samples."""
        return _generator(self._seed, epoch).permutation(self.num_draws)


class WindowShuffledOrder:
    """Every sample once an epoch, shuffled among ``window`` files at a time.

    The files are shuffled and taken ``window`` at a time; the samples of one window are shuffled together. A reader
    that keeps ``window`` files open opens each file once an epoch.

    Args:
        groups: ``[num_samples]``: the file (any integer) that each sample is read from.
        window: files that are read in turn.
        seed: of the shuffle.

    Raises:
        ValueError: no samples, or a window without a file.
    """

    def __init__(self, groups: Sequence[int] | np.ndarray, window: int, seed: int) -> None:
        if len(groups) < 1:
            raise ValueError("An order needs one sample at least; got no groups.")
        if window < 1:
            raise ValueError(f"A shuffle window holds one file at least; got window={window}.")
        files, self._file_of_sample = np.unique(np.asarray(groups), return_inverse=True)
        self.num_draws = len(groups)
        self.num_files = len(files)
        self._window = window
        self._seed = seed

    def epoch(self, epoch: int) -> np.ndarray:
        """A permutation of all samples, window by window."""
        generator = _generator(self._seed, epoch)
        samples = generator.permutation(self.num_draws)
        place_of_file = generator.permutation(self.num_files)
        window_of_draw = place_of_file[self._file_of_sample[samples]] // self._window
        return samples[np.argsort(window_of_draw, kind="stable")]


class MixtureOrder:
    """Draws several datasets in fixed proportions, evenly interleaved.

    Indices are those of the concatenated datasets: sample i of dataset k is ``sum(lengths[:k]) + i``. Each dataset is
    walked through without replacement; its next walk, in another order, begins where the last one ended, across
    epochs. The draws of a dataset lie evenly in the epoch: over any stretch of it, its share is right to within a draw
    a dataset.

    Args:
        lengths: samples of each dataset.
        weights: share of each dataset, of any sum; None for shares in proportion to the lengths, so that every
            sample comes exactly once an epoch.
        seed: of the walks and of the interleaving.
        num_draws: samples an epoch; None for the sum of the lengths.
        orders: how each dataset is walked through; None shuffles each.

    Attributes:
        quotas: draws of each dataset an epoch (largest-remainder rounding of the shares).

    Raises:
        ValueError: an empty dataset, a weight that is not positive, or one too small for a single draw an epoch.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        weights: Sequence[float] | None,
        seed: int,
        num_draws: int | None = None,
        orders: Sequence[SampleOrder] | None = None,
    ) -> None:
        shares = list(lengths) if weights is None else list(weights)
        _require_shares(lengths, shares)
        self.num_draws = sum(lengths) if num_draws is None else num_draws
        self.quotas = _apportion(shares, self.num_draws)
        if min(self.quotas) < 1:
            raise ValueError(
                f"Every dataset needs one draw an epoch at least; weights {shares} over {self.num_draws} draws give "
                f"{self.quotas}. Raise the smallest weight or num_draws."
            )
        self._offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        self._seed = seed
        self._walks = orders or [ShuffledOrder(length, _derived_seed(seed, k)) for k, length in enumerate(lengths)]
        _require_lengths(lengths, self._walks)

    def epoch(self, epoch: int) -> np.ndarray:
        """``[num_draws]`` indices, ``quotas[k]`` of them from dataset k."""
        generator = _generator(self._seed, epoch)
        draws, times = [], []
        for offset, quota, walk in zip(self._offsets, self.quotas, self._walks, strict=True):
            draws.append(offset + _stretch(walk, epoch * quota, quota))
            times.append((np.arange(quota) + generator.random(quota)) / quota)
        return np.concatenate(draws)[np.argsort(np.concatenate(times), kind="stable")]


def _stretch(walk: SampleOrder, start: int, count: int) -> np.ndarray:
    """``count`` draws of the endless series of walks, from position ``start``."""
    first, last = start // walk.num_draws, (start + count - 1) // walk.num_draws
    walks = np.concatenate([walk.epoch(number) for number in range(first, last + 1)])
    begin = start - first * walk.num_draws
    return walks[begin : begin + count]


def _apportion(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers of sum ``total`` in proportion to the shares, by largest remainders."""
    exact = np.asarray(shares, dtype=np.float64) / np.sum(shares) * total
    quotas = np.floor(exact + 1e-9).astype(np.int64)
    largest = np.argsort(-(exact - quotas), kind="stable")[: total - int(quotas.sum())]
    quotas[largest] += 1
    return [int(quota) for quota in quotas]


def _require_shares(lengths: Sequence[int], shares: Sequence[float]) -> None:
    if not lengths or min(lengths) < 1:
        raise ValueError(f"A mixture needs datasets with one sample each at least; got lengths {list(lengths)}.")
    if len(shares) != len(lengths):
        raise ValueError(f"A mixture needs one weight a dataset; got {len(shares)} weights for {len(lengths)}.")
    if not all(np.isfinite(share) and share > 0 for share in shares):
        raise ValueError(f"Weights are positive; got {list(shares)}. Leave out a dataset that is not to be drawn.")


def _require_lengths(lengths: Sequence[int], walks: Sequence[SampleOrder]) -> None:
    found = [walk.num_draws for walk in walks]
    if found != list(lengths):
        raise ValueError(
            f"Each dataset's order draws all of its samples; got {found} draws for lengths {list(lengths)}."
        )


def _generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.default_rng([seed, epoch])


def _derived_seed(seed: int, stream: int) -> int:
    return int(np.random.SeedSequence([seed, stream]).generate_state(1)[0])


def files_of_samples(dataset: Any) -> np.ndarray:
    """``[num_samples]``: a number for the set of files that each sample of a ``LeRobotDataset`` is read from.

    Video files where there are videos (several episodes share one), the data file otherwise.
    """
    table = dataset.meta.episodes.with_format("arrow")[:]
    stores = [f"videos/{key}" for key in dataset.meta.video_keys] or ["data"]
    places = [table[f"{store}/{part}"].to_numpy() for store in stores for part in ("chunk_index", "file_index")]
    files_of_episode = np.unique(np.stack(places, axis=1), axis=0, return_inverse=True)[1].ravel()
    return files_of_episode[dataset.hf_dataset.data.column("episode_index").to_numpy()]


def count_opens(files: Sequence[int], num_open: int) -> int:
    """How often a reader that keeps the ``num_open`` files used last opens one, for a sequence of reads."""
    kept: dict[int, None] = {}
    opens = 0
    for file in files:
        if file in kept:
            del kept[file]
        else:
            opens += 1
        kept[file] = None
        if len(kept) > num_open:
            del kept[next(iter(kept))]
    return opens
