# SPDX-License-Identifier: Apache-2.0
"""Packing a million samples into bins: time, share of the budget that is used, balance over ranks.

Distributions: LIBERO-like (two images of 256 tokens, prompts of 45 to 65, 50 actions), mixture-like (half one image
and 20 prompt tokens, half three images and 150), and the mixture with prompts that vary by 20 tokens. The budget is
that many mean samples, or the one that the packer chooses within 2 % above. Time is process CPU time of one core.

    python benchmarks/packing.py --output benchmarks/results
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from embodix.contracts import BatchComposer
from embodix.data.order import ShuffledOrder
from embodix.packing.batches import BatchStream, FixedCountComposer
from embodix.packing.bins import Limits
from embodix.packing.sample_cost import SampleSizes
from embodix.packing.token_budget import ALGORITHMS, TokenBudgetPacker
from embodix.report.benchmark import require_quotable, write_benchmark

NUM_SAMPLES, NUM_RANKS, NUM_STEPS = 1_000_000, 8, 2000


def libero_like(generator: np.random.Generator, num_samples: int) -> SampleSizes:
    prompts = generator.integers(45, 66, num_samples)
    return SampleSizes(512 + prompts, np.full(num_samples, 2), num_actions=50)


def mixture_like(generator: np.random.Generator, num_samples: int) -> SampleSizes:
    is_small = generator.random(num_samples) < 0.5
    return SampleSizes(np.where(is_small, 276, 918), np.where(is_small, 1, 3), num_actions=50)


def varied_mixture(generator: np.random.Generator, num_samples: int) -> SampleSizes:
    sizes = mixture_like(generator, num_samples)
    return SampleSizes(sizes.prefix_N + generator.integers(-10, 11, num_samples), sizes.images_N, num_actions=50)


DISTRIBUTIONS = {"LIBERO-like": libero_like, "mixture-like": mixture_like, "mixture, varied prompts": varied_mixture}


def measure_bins(sizes: SampleSizes, algorithm: str, samples_per_bin: int, chosen: bool) -> dict[str, float]:
    """Time and utilisation of one pass over all samples; every sample must be there once.

    Args:
        chosen: the budget is the packer's choice; else it is ``samples_per_bin`` mean samples.
    """
    costs, images, samples = sizes.tokens.astype(np.float64), sizes.images_N, np.arange(len(sizes))
    start = time.process_time()
    budget = int(np.floor(costs.mean() * samples_per_bin))
    if chosen:
        budget = TokenBudgetPacker(algorithm=algorithm).choose_budget(costs, images, samples_per_bin)
    bins = ALGORITHMS[algorithm](samples, costs, images, Limits(budget))
    seconds = time.process_time() - start
    assert np.array_equal(np.sort(bins.samples_N), samples)
    filled = bins.sums(costs)
    assert filled.max() <= budget
    return {"seconds": seconds, "utilisation": float(filled.mean()) / budget, "samples": float(bins.num_samples.mean())}


def measure_balance(sizes: SampleSizes, composer: BatchComposer) -> dict[str, float]:
    """Largest over mean cost of a rank, over the steps of a stream."""
    order = ShuffledOrder(len(sizes), seed=0)
    samples_per_step = 8 * composer.bins_per_step
    stream = BatchStream(order, composer, sizes, num_ranks=NUM_RANKS, samples_per_step=samples_per_step)
    imbalance = [next(stream).imbalance for _ in range(NUM_STEPS)]
    return {"mean": statistics.fmean(imbalance), "largest": max(imbalance)}


def bin_rows(num_samples: int) -> list[dict[str, Any]]:
    rows = []
    for name, distribution in DISTRIBUTIONS.items():
        sizes = distribution(np.random.default_rng(0), num_samples)
        for algorithm, samples_per_bin, chosen in itertools.product(ALGORITHMS, (8, 16, 32), (True, False)):
            row: dict[str, Any] = {"lengths": name, "algorithm": algorithm, "samples a bin": samples_per_bin}
            row["budget"] = "chosen" if chosen else "the mean"
            row |= measure_bins(sizes, algorithm, samples_per_bin, chosen)
            rows.append(row)
            print(row, flush=True)
    return rows


def balance_rows() -> list[dict[str, Any]]:
    composers: dict[str, BatchComposer] = {
        "token budget": TokenBudgetPacker(),
        "token budget, 2 bins a rank": TokenBudgetPacker(bins_per_step=2),
        "naive: 8 samples a rank": FixedCountComposer(),
    }
    rows = []
    for name, distribution in DISTRIBUTIONS.items():
        sizes = distribution(np.random.default_rng(0), 100_000)
        for composer_name, composer in composers.items():
            row = {"lengths": name, "batches": composer_name, **measure_balance(sizes, composer)}
            rows.append(row)
            print(row, flush=True)
    return rows


def as_result(bins: list[dict[str, Any]], balance: list[dict[str, Any]], num_samples: int) -> dict[str, Any]:
    return {
        "title": f"Packing {num_samples:,} samples by cost",
        "setup": "Budgets of 8, 16 and 32 mean samples exactly, or chosen by the packer up to 2 % above. Process CPU "
        "time of one core.",
        "bins": [
            {**row, "seconds": f"{row['seconds']:.2f}", "utilisation": f"{row['utilisation']:.2%}"}
            | {"samples": f"{row['samples']:.2f}"}
            for row in bins
        ],
        "balance": [{**row, "mean": f"{row['mean']:.4f}", "largest": f"{row['largest']:.4f}"} for row in balance],
        "reading": f"`samples` is the mean of a bin. Balance is the largest over the mean cost of {NUM_RANKS} ranks: "
        f"its mean over {NUM_STEPS} steps, the end of an epoch among them, and its largest. First-fit decreasing puts "
        "samples of one size together, which leaves room that nothing of that size fills; best-fit mixes sizes and is "
        "the default. Two sizes alone fill few budgets well, which is why a budget is chosen where none is given.",
        "measurements": {"bins": bins, "balance": balance},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--allow-dirty", action="store_true", help="measure uncommitted code; marks the result")
    options = parser.parse_args()
    require_quotable(options.allow_dirty)
    result = as_result(bin_rows(options.samples), balance_rows(), options.samples)
    write_benchmark(options.output / "packing", result, options.allow_dirty)


if __name__ == "__main__":
    main()
