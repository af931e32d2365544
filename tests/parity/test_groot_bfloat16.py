# SPDX-License-Identifier: Apache-2.0
"""bf16 (GR00T's own autocast): the packed path is as close to fp32 as upstream is."""

from __future__ import annotations

import pytest
import torch

from embodix.attention.cpu import SegmentGemm, SegmentSdpa
from embodix.packing.layout import PaddedPacker, PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix.testing.errors import compare_gradients, relative_error
from embodix_groot.testing import (
    fast_actions,
    random_batch,
    reference_actions,
    run_fast,
    run_reference,
    small_groot,
    strengthen,
)

SEEDS = range(4)


def mean(values):
    values = list(values)
    return sum(values) / len(values)


@pytest.fixture(scope="module", params=[False, True], ids=["frozen", "tuned"])
def policies(request):
    """The same weights under bf16 autocast and in fp32; upstream casts a batch to bf16 before it draws."""
    tuned = request.param
    half = strengthen(small_groot(tune_llm=tuned, tune_visual=tuned, use_bf16=True))
    full = strengthen(small_groot(tune_llm=tuned, tune_visual=tuned))
    full.load_state_dict(half.state_dict())
    batch = random_batch(half, [3, 12, 7], [2, 1, 3])
    rounded = {key: value.bfloat16() if value.is_floating_point() else value for key, value in batch.items()}
    return half, full, rounded


@pytest.mark.parametrize(
    ("packer", "attention"),
    [(PaddingFreePacker(), SegmentGemm()), (PaddingFreePacker(), SegmentSdpa()), (PaddedPacker(), None)],
    ids=["gemm", "sdpa", "dense"],
)
def test_training_is_within_upstreams_own_error(policies, packer, attention):
    half, full, batch = policies
    choice = FastPathSettings(packer, attention)
    wanted = [run_reference(full, batch, seed) for seed in SEEDS]
    errors = {}
    for name, runs in {
        "upstream": [run_reference(half, batch, seed) for seed in SEEDS],
        "fast": [run_fast(half, batch, choice, seed) for seed in SEEDS],
    }.items():
        pairs = list(zip(runs, wanted, strict=True))
        comparisons = [compare_gradients(run.gradients, exact.gradients) for run, exact in pairs]
        assert all(comparison.structure == [] for comparison in comparisons)
        errors[name] = (
            mean(abs(run.loss - exact.loss) / exact.loss for run, exact in pairs),
            mean(comparison.whole for comparison in comparisons),
        )
    loss_floor = 1e-3
    assert errors["fast"][0] <= max(1.5 * errors["upstream"][0], loss_floor)
    assert errors["fast"][1] <= 1.25 * errors["upstream"][1]


def test_actions_are_within_upstreams_own_error(policies):
    half, full, batch = policies
    choice = FastPathSettings(PaddingFreePacker(), SegmentGemm())
    noises = [torch.randn(batch["action"].shape, generator=torch.Generator().manual_seed(seed)) for seed in SEEDS]
    errors = [
        mean(relative_error(run(noise), reference_actions(full, batch, noise)) for noise in noises)
        for run in (lambda noise: fast_actions(half, batch, choice, noise), lambda n: reference_actions(half, batch, n))
    ]
    assert errors[0] <= 1.5 * errors[1]
