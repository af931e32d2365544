# SPDX-License-Identifier: Apache-2.0
"""A mixture of robots: token-budget batches against batch-maximum padding with cameras pruned.

Half of the samples have one camera and a prompt of 20 tokens, half three cameras and 150. The strong baseline pads
every batch to its own longest prompt and its own largest number of cameras, and computes all of that with the same
kernels; the other packs the same samples by cost and computes valid tokens only. π0.5 at one eighth of every width,
random weights, 224 px. Ratios are of process CPU time a sample, forward and backward, over alternating passes.

    python benchmarks/token_budget.py --repetitions 3 --output benchmarks/results
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pi05_forward_backward import CAMERAS, ONE_EIGHTH

from embodix.attention.cpu import SegmentAuto
from embodix.contracts import BatchComposer, Packer
from embodix.data.order import ShuffledOrder
from embodix.packing.batches import BatchStream, FixedCountComposer
from embodix.packing.layout import PaddedPacker
from embodix.packing.sample_cost import SampleSizes
from embodix.packing.token_budget import TokenBudgetPacker
from embodix.policies.settings import FastPathSettings, TokenCounts
from embodix.report.benchmark import require_quotable, write_benchmark
from embodix_pi05.testing import image_key, random_batch, small_pi05
from embodix_pi05.wrapper import Pi05Wrapper

PROMPTS, IMAGES, PATCHES, NUM_ACTIONS = (20, 150), (1, 3), 256, 50
SAMPLES_A_STEP = 8
Batch = dict[str, torch.Tensor]


def mixture(num_samples: int) -> SampleSizes:
    """Exactly half of each kind, in random order."""
    kinds = np.random.default_rng(0).permutation(np.arange(num_samples) % 2)
    images = np.array(IMAGES)[kinds]
    return SampleSizes(images * PATCHES + np.array(PROMPTS)[kinds], images, NUM_ACTIONS)


def bins_of_epoch(sizes: SampleSizes, composer: BatchComposer) -> list[list[int]]:
    """The batches of one epoch: the same samples for every composer."""
    order = ShuffledOrder(len(sizes), seed=0)
    stream = BatchStream(order, composer, sizes, num_ranks=1, samples_per_step=SAMPLES_A_STEP)
    bins = []
    while stream.position.epoch == 0:
        bins.append(next(stream).ranks[0][0].tolist())
    assert sorted(sample for members in bins for sample in members) == list(range(len(sizes)))
    return bins


def batch_of(policy: Any, sizes: SampleSizes, members: Sequence[int], seed: int) -> Batch:
    """A batch trimmed to its own largest number of cameras and longest prompt."""
    images = sizes.images_N[list(members)]
    prompts = (sizes.prefix_N[list(members)] - images * PATCHES).tolist()
    cameras = CAMERAS[: int(images.max())]
    absent = [[camera >= count for camera in range(len(cameras))] for count in images]
    batch = random_batch(policy, prompts, cameras=cameras, camera_is_pad=absent, padded_length=max(prompts), seed=seed)
    for slot, camera in enumerate(cameras):  # an absent camera is a blank image, as in upstream
        batch[image_key(camera)][batch["camera_is_pad"][:, slot]] = 0.0
    return batch


class Variant:
    """One way to batch and compute the same samples."""

    def __init__(self, name: str, sizes: SampleSizes, composer: BatchComposer, packer: Packer, images: str) -> None:
        self.name = name
        self.bins = bins_of_epoch(sizes, composer)
        self.settings = FastPathSettings(packer, SegmentAuto(), images, uneven_batches=True)  # type: ignore[arg-type]
        self.seconds: list[float] = []
        self.counts: list[TokenCounts] = []
        self._sizes = sizes

    def run(self, policies: dict[int, Any], num_bins: int | None = None) -> float:
        """CPU seconds of forward and backward of the epoch, or of its first bins."""
        seconds, self.counts = 0.0, []
        for number, members in enumerate(self.bins[:num_bins]):
            num_cameras = int(self._sizes.images_N[members].max())
            policy = policies[num_cameras]
            batch = batch_of(policy, self._sizes, members, seed=number)
            installation = Pi05Wrapper().install(policy, self.settings)
            policy.zero_grad(set_to_none=True)
            start = time.process_time()
            loss, _ = policy.forward(batch)
            loss.backward()
            seconds += time.process_time() - start
            assert torch.isfinite(loss) and installation.token_counts is not None
            self.counts.append(installation.token_counts)
            installation.uninstall()
        return seconds

    def tokens(self, name: str) -> int:
        return sum(getattr(counts, name) for counts in self.counts)


def build_policies() -> dict[int, Any]:
    """A policy with as many camera slots as a batch needs: cameras that no sample of a batch has are pruned."""
    sizes = {"image_size": 224, "chunk_size": NUM_ACTIONS, "n_action_steps": NUM_ACTIONS, "max_action_dim": 32}
    return {count: small_pi05(ONE_EIGHTH, cameras=CAMERAS[:count], action_dim=7, **sizes) for count in (1, 2, 3)}


def measure(num_samples: int, repetitions: int) -> dict[str, Any]:
    """Alternate the variants over the same samples."""
    sizes = mixture(num_samples)
    policies = build_policies()
    budget = TokenBudgetPacker()
    padded = Variant("batch maximum", sizes, FixedCountComposer(), PaddedPacker(), "upstream")
    packed = Variant("token_budget", sizes, budget, budget, "valid")
    for variant in (padded, packed):
        variant.run(policies, num_bins=1)  # warm-up
    for _ in range(repetitions):
        for variant in (padded, packed):
            variant.seconds.append(variant.run(policies))
    ratios = sorted(a / b for a, b in zip(padded.seconds, packed.seconds, strict=True))
    assert padded.tokens("valid") == packed.tokens("valid")
    return {
        "ratio": statistics.median(ratios),
        "ratio_lowest": ratios[0],
        "ratio_highest": ratios[-1],
        "token_ratio": padded.tokens("computed") / packed.tokens("computed"),
        "image_ratio": padded.tokens("images_computed") / packed.tokens("images_computed"),
        "variants": [
            {
                "batches": variant.name,
                "steps": len(variant.bins),
                "CPU seconds a sample": min(variant.seconds) / num_samples,
                "valid tokens": variant.tokens("valid") / variant.tokens("computed"),
                "images a sample": variant.tokens("images_computed") / num_samples,
            }
            for variant in (padded, packed)
        ],
        "num_samples": num_samples,
        "repetitions": repetitions,
    }


def as_result(measured: dict[str, Any]) -> dict[str, Any]:
    variants = [
        {
            **row,
            "CPU seconds a sample": f"{row['CPU seconds a sample']:.3f}",
            "valid tokens": f"{row['valid tokens']:.1%}",
        }
        for row in measured["variants"]
    ]
    ratio, low, high = (measured[key] for key in ("ratio", "ratio_lowest", "ratio_highest"))
    return {
        "title": "Token-budget batches of a mixture against batch-maximum padding with cameras pruned",
        "setup": f"{measured['num_samples']} samples, half with one camera and 20 prompt tokens, half with three and "
        f"150; {SAMPLES_A_STEP} a step. π0.5 at one eighth of every width, 4 language and 6 vision layers, 224 px, "
        "float32. The baseline runs on the same kernels. Process CPU time of forward and backward.",
        "result": f"**{ratio:.2f}x** ({low:.2f} to {high:.2f} over {measured['repetitions']} alternating passes) the "
        f"samples in the same CPU time; tokens {measured['token_ratio']:.2f}x, images {measured['image_ratio']:.2f}x.",
        "batches": variants,
        "measurements": measured,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--allow-dirty", action="store_true", help="measure uncommitted code; marks the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    require_quotable(options.allow_dirty)
    result = as_result(measure(options.samples, options.repetitions))
    print(result["result"])
    write_benchmark(options.output / "token_budget", result, options.allow_dirty)


if __name__ == "__main__":
    main()
