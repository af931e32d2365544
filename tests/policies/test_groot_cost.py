# SPDX-License-Identifier: Apache-2.0
"""The cost model of GR00T-N1.5 agrees with torch's counter."""

from __future__ import annotations

import dataclasses

import pytest
from embodix_groot.cost import Work, sample_flops, sizes_of, speed_bounds

from embodix.attention.cpu import SegmentSdpa
from embodix.packing.layout import PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix.report.steps import PHASES, StepRecord, TokenRecord
from embodix.training.flops import flop_counter
from embodix_groot.testing import SMALL_ARCHITECTURE, random_batch, small_groot
from embodix_groot.wrapper import GrootN15Wrapper

TEXT, IMAGES, BATCH = 9, 2, 2
POLICY = {"max_state_dim": 12, "max_action_dim": 8, "chunk_size": 16}
ROWS = TEXT + 4 * IMAGES


def counted_flops(policy) -> tuple[float, float]:
    """Operations of one sample's forward and backward pass by torch's counter."""
    batch = random_batch(policy, [TEXT] * BATCH, [IMAGES] * BATCH)
    with flop_counter() as forward:
        loss = policy.forward(batch)[0]
    with flop_counter() as backward:
        loss.backward()
    return forward.get_total_flops() / BATCH, backward.get_total_flops() / BATCH


@pytest.mark.parametrize("upstream", [True, False])
@pytest.mark.parametrize(("tune_llm", "tune_visual"), [(False, False), (True, True), (True, False), (False, True)])
def test_operations_are_those_that_torch_counts(tune_llm: bool, tune_visual: bool, upstream: bool) -> None:
    policy = small_groot(tune_llm=tune_llm, tune_visual=tune_visual)
    if not upstream:
        GrootN15Wrapper().install(policy, FastPathSettings(PaddingFreePacker(), SegmentSdpa()))
    sizes = sizes_of({**POLICY, "tune_llm": tune_llm, "tune_visual": tune_visual}, SMALL_ARCHITECTURE)
    expected = sample_flops(sizes, Work(IMAGES, ROWS), upstream=upstream)
    forward, backward = counted_flops(policy)
    # Left out: the rotary tables, and the fast norms' products with a vector.
    assert forward == pytest.approx(expected.forward, rel=5e-3)
    assert backward == pytest.approx(expected.backward, rel=1e-2)


def record(tokens: TokenRecord | None) -> StepRecord:
    times = dict.fromkeys(PHASES, 0.0)
    return StepRecord(1, 1.0, 1.0, 1e-4, BATCH, times, times, tokens, None, None)


def test_bounds_come_from_counted_tokens() -> None:
    sizes = sizes_of({**POLICY, "tune_llm": True, "tune_visual": True}, SMALL_ARCHITECTURE)
    actions = BATCH * sizes.num_queries
    tokens = TokenRecord(
        valid=BATCH * ROWS + actions,
        computed=BATCH * ROWS + actions,
        upstream=BATCH * 2 * ROWS + actions,
        images_computed=BATCH * IMAGES,
        images_upstream=BATCH * IMAGES,
    )
    config = {"policy": {**POLICY, "tune_llm": True, "tune_visual": True}, "architecture": SMALL_ARCHITECTURE}
    configs, records = {"upstream": config, "fast": config}, {"upstream": [record(None)], "fast": [record(tokens)]}
    bound = speed_bounds(configs, records, "upstream")["fast"]
    upstream = sample_flops(sizes, Work(IMAGES, 2 * ROWS), upstream=True).total
    assert bound.this_size == pytest.approx(upstream / sample_flops(sizes, Work(IMAGES, ROWS), upstream=False).total)
    assert bound.real_size is not None
    assert 1 < bound.real_size < bound.this_size

    uncounted = {name: [dataclasses.replace(record(None))] for name in configs}
    assert speed_bounds(configs, uncounted, "upstream") == {}
