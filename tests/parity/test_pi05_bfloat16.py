# SPDX-License-Identifier: Apache-2.0
"""bf16: the packed path is as close to fp32 as upstream's own padded path is."""

from __future__ import annotations

import pytest
import torch

from embodix.attention.cpu import SegmentGemm, SegmentSdpa
from embodix.packing.layout import PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix.testing.errors import compare_gradients, relative_error
from embodix_pi05.testing import fast_actions, random_batch, run_fast, run_upstream, small_pi05, upstream_actions

SEEDS = range(4)


def mean(values):
    values = list(values)
    return sum(values) / len(values)


@pytest.fixture(scope="module")
def policies():
    """The same weights (rounded to bf16 where upstream rounds) computing in bf16 and in fp32."""
    half, full = small_pi05(dtype="bfloat16", empty_cameras=1), small_pi05(empty_cameras=1)
    full.load_state_dict(half.state_dict())
    batch = random_batch(half, [3, 12, 7], camera_is_pad=[[False, True], [False, False], [True, False]])
    return half, full, batch


@pytest.mark.parametrize("attention", [SegmentGemm(), SegmentSdpa()], ids=lambda backend: backend.name)
def test_training_is_within_upstreams_own_error(policies, attention):
    half, full, batch = policies
    choice = FastPathSettings(PaddingFreePacker(), attention)
    wanted = [run_upstream(full, batch, seed) for seed in SEEDS]
    errors = {}
    for name, runs in {
        "upstream": [run_upstream(half, batch, seed) for seed in SEEDS],
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
    errors = [
        mean(relative_error(run(seed), upstream_actions(full, batch, seed)) for seed in SEEDS)
        for run in (lambda seed: fast_actions(half, batch, choice, seed), lambda s: upstream_actions(half, batch, s))
    ]
    assert errors[0] <= 1.5 * errors[1]


def test_autocast_gives_upstreams_numbers_within_bf16(policies):
    _, full, batch = policies
    choice = FastPathSettings(PaddingFreePacker(), SegmentGemm())
    exact = run_upstream(full, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        upstream, fast = run_upstream(full, batch), run_fast(full, batch, choice)
    own = compare_gradients(upstream.gradients, exact.gradients).whole
    assert compare_gradients(fast.gradients, exact.gradients).whole <= 1.25 * own
    assert compare_gradients(fast.gradients, exact.gradients).structure == []
