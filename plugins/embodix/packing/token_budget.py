# SPDX-License-Identifier: Apache-2.0
"""Batches of equal cost instead of equal numbers of samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from embodix.packing.batches import require_bins_per_step
from embodix.packing.bins import NUM_TRIED, Bins, Limits, best_fit, first_fit_decreasing
from embodix.packing.layout import PackedLayout, PaddingFreePacker
from embodix.packing.sample_cost import CostModel, FloatArray, IntArray, SampleSizes

ALGORITHMS = {"best_fit": best_fit, "first_fit_decreasing": first_fit_decreasing}
FIT = "fit"
BUDGET_SLACKS = (0.0, 0.005, 0.01, 0.02)
# Where bins hold few samples, one more is a large step: larger budgets that are tried to hold enough.
WIDE_SLACKS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
ENOUGH = 0.97  # of the samples that a bin should hold on average


@dataclass(frozen=True)
class Trial:
    """How the first samples of an epoch fill a budget: the share that is used, and samples a bin."""

    budget: int
    used: float
    samples: float


class TokenBudgetPacker:
    """Fills bins up to a budget and computes their valid rows only.

    Args:
        budget: cost of a bin at most, in tokens (images, prompt and actions); None for ``samples_per_bin`` times the
            mean cost of a sample, or up to 2 % more where the epoch's first samples fill that better, or up to half
            as much again where bins of few samples would hold too few.
        algorithm: ``best_fit`` fills bins in the order of the samples and mixes all sizes in each; with
            ``first_fit_decreasing`` the large samples of a window share bins.
        look_ahead: samples that may be passed over; None for 256 (``best_fit``) or 4096.
        bins_per_step: micro-batches of a step on each rank.
        max_samples, max_images: further limits of a bin; None for none.
        cost: ``tokens``; coefficients (``tokens``, ``tokens_squared``, ``images``), scaled so that a mean sample costs
            what it has tokens; or ``fit``, which counts tokens until the coefficients are fitted to the first
            ``fit_steps`` steps of the run.
        fit_steps: steps measured for ``fit``.

    Raises:
        ValueError: an unknown algorithm or cost, or a limit below one.
    """

    name = "token_budget"

    def __init__(
        self,
        budget: float | None = None,
        algorithm: Literal["best_fit", "first_fit_decreasing"] = "best_fit",
        look_ahead: int | None = None,
        bins_per_step: int = 1,
        max_samples: int | None = None,
        max_images: int | None = None,
        cost: str | Mapping[str, float] = "tokens",
        fit_steps: int = 20,
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"packing.options.algorithm is one of {', '.join(ALGORITHMS)}; got {algorithm!r}.")
        if (look_ahead is not None and look_ahead < 1) or fit_steps < 1:
            raise ValueError(f"look_ahead and fit_steps are 1 or more; got {look_ahead} and {fit_steps}.")
        Limits(1 if budget is None else budget, max_samples, max_images)
        self.budget = budget
        self.bins_per_step = require_bins_per_step(bins_per_step)
        self.cost_model, self.fit_steps = _cost_model(cost), fit_steps if cost == FIT else None
        self._pack = ALGORITHMS[algorithm]
        self._options = {} if look_ahead is None else {"look_ahead": look_ahead}
        self._max_samples, self._max_images = max_samples, max_images
        self._padding_free = PaddingFreePacker()

    def layout(self, valid_BS: Tensor) -> PackedLayout:
        """The valid rows."""
        return self._padding_free.layout(valid_BS)

    def compose(self, samples_N: IntArray, sizes: SampleSizes, samples_per_bin: float, cost: CostModel) -> Bins:
        """Bins within the limits, see :class:`embodix.contracts.BatchComposer`."""
        costs_N, images_N = cost.costs(sizes)[samples_N], sizes.images_N[samples_N]
        budget = self.budget if self.budget is not None else self.choose_budget(costs_N, images_N, samples_per_bin)
        return self._bins(samples_N, costs_N, images_N, budget)

    def choose_budget(self, costs_N: FloatArray, images_N: IntArray, samples_per_bin: float) -> int:
        """The budget of an epoch where none is set.

        Of those in ``BUDGET_SLACKS`` the one that is filled best, if its bins hold enough samples; else the larger one
        whose bins come nearest to ``samples_per_bin``. The largest sample always fits.
        """
        mean_bin = samples_per_bin * float(costs_N.mean())
        costs_T, images_T = costs_N[:NUM_TRIED], images_N[:NUM_TRIED]
        largest = math.ceil(float(costs_N.max()))

        def trial(slack: float) -> Trial:
            budget = max(largest, math.floor(mean_bin * (1 + slack)))
            bins = self._bins(np.arange(costs_T.size), costs_T, images_T, budget)
            used = float(bins.sums(costs_T)[:-1].sum()) / (budget * max(1, len(bins) - 1))
            return Trial(budget, used, float(bins.num_samples.mean()))

        best = max(map(trial, BUDGET_SLACKS), key=lambda tried: tried.used)
        if best.samples >= ENOUGH * samples_per_bin:
            return best.budget
        return min([best, *map(trial, WIDE_SLACKS)], key=lambda tried: abs(tried.samples - samples_per_bin)).budget

    def _bins(self, samples_N: IntArray, costs_N: FloatArray, images_N: IntArray, budget: float) -> Bins:
        limits = Limits(max(budget, 1), self._max_samples, self._max_images)
        return self._pack(samples_N, costs_N, images_N, limits, **self._options)


def _cost_model(cost: str | Mapping[str, float]) -> CostModel:
    if isinstance(cost, Mapping):
        return CostModel.from_mapping(cost)
    if cost not in ("tokens", FIT):
        raise ValueError(
            f"packing.options.cost is 'tokens', '{FIT}' or a mapping of coefficients (tokens, tokens_squared, images); "
            f"got {cost!r}."
        )
    return CostModel()
