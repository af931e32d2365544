# SPDX-License-Identifier: Apache-2.0
"""Batches computed in few fixed shapes have the loss and gradients of the same batches without padding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from embodix.attention.cpu import SegmentAuto
from embodix.data.order import ShuffledOrder
from embodix.packing.batches import BatchStream
from embodix.packing.layout import PackedLayout, PaddingFreePacker
from embodix.packing.sample_cost import CostModel, SampleSizes
from embodix.packing.sequence_length import SequenceLengthPacker
from embodix.policies.settings import FastPathSettings
from embodix.testing.errors import compare_gradients
from embodix_pi05.testing import random_batch, run_fast, small_pi05
from embodix_pi05.wrapper import Pi05Wrapper

NUM_SAMPLES, PATCHES = 60, 4


@cache
def sizes() -> SampleSizes:
    generator = np.random.default_rng(0)
    images = generator.integers(1, 3, NUM_SAMPLES)
    return SampleSizes(images * PATCHES + generator.integers(1, 13, NUM_SAMPLES), images, num_actions=6)


def composed(num_shapes: int, samples_per_step: float = 4) -> tuple[SequenceLengthPacker, BatchStream]:
    packer = SequenceLengthPacker(num_shapes=num_shapes, look_ahead=16)
    order = ShuffledOrder(NUM_SAMPLES, seed=0)
    return packer, BatchStream(order, packer, sizes(), num_ranks=1, samples_per_step=samples_per_step)


def batch_of(policy: Any, samples: np.ndarray) -> dict[str, torch.Tensor]:
    """Samples of the sizes that the stream was packed by."""
    images = sizes().images_N[samples]
    prompts = (sizes().prefix_N[samples] - images * PATCHES).tolist()
    absent = [[False, bool(count < 2)] for count in images]
    return random_batch(policy, prompts, camera_is_pad=absent, seed=int(samples[0]))


@pytest.mark.parametrize("attention", [SegmentAuto(), None], ids=["varlen", "dense"])
@pytest.mark.parametrize("flow_samples", [1, 2])
def test_padding_to_a_shape_changes_nothing(attention: Any, flow_samples: int) -> None:
    policy = small_pi05()
    packer, stream = composed(num_shapes=3)
    for step in [next(stream) for _ in range(4)]:
        batch = batch_of(policy, step.ranks[0][0])
        exact = FastPathSettings(PaddingFreePacker(), attention, flow_samples=flow_samples)
        padded = FastPathSettings(packer, attention, flow_samples=flow_samples)
        wanted, got = run_fast(policy, batch, exact), run_fast(policy, batch, padded)
        assert got.loss == pytest.approx(wanted.loss, rel=1e-6)
        comparison = compare_gradients(got.gradients, wanted.gradients)
        assert comparison.structure == []
        assert comparison.worst <= 1e-5, comparison
        assert torch.equal(got.random_state, wanted.random_state)


class BlindPacker(SequenceLengthPacker):
    """Mutation: takes the last blank row for a token in place of the first token."""

    def pad(self, layout: PackedLayout, num_images: int) -> PackedLayout:
        padded = super().pad(layout, num_images)
        assert padded.valid_rows_V is not None
        return replace(padded, valid_rows_V=padded.valid_rows_V + 1)


def test_a_blank_row_that_is_read_changes_the_loss() -> None:
    policy, batch = small_pi05(), random_batch(small_pi05(), [5, 9])
    packer = BlindPacker(rows=100, max_samples=4, max_images=8, num_shapes=1)
    packer.compose(np.arange(NUM_SAMPLES), sizes(), 4.0, CostModel())
    exact = run_fast(policy, batch, FastPathSettings(PaddingFreePacker(), SegmentAuto()))
    mutated = run_fast(policy, batch, FastPathSettings(packer, SegmentAuto()))
    assert abs(mutated.loss - exact.loss) > 1e-4 * exact.loss


def test_linear_layers_see_no_more_shapes_than_asked_for() -> None:
    num_shapes = 2
    policy = small_pi05()
    packer, stream = composed(num_shapes)
    installation = Pi05Wrapper().install(policy, FastPathSettings(packer, SegmentAuto()))
    seen: dict[str, set[tuple[int, ...]]] = {}
    unpadded: set[int] = set()
    for name, module in policy.named_modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: seen.setdefault(name, set()).add(tuple(inputs[0].shape))
            )
    while stream.position.epoch < 2:
        samples = next(stream).ranks[0][0]
        policy.forward(batch_of(policy, samples))
        counts = installation.token_counts
        assert counts is not None and counts.computed >= counts.valid
        unpadded.add(counts.valid)
    policy.forward(batch_of(policy, samples[:1]))  # the end of an epoch may be small
    assert len(unpadded) > 2 * num_shapes, "the bins themselves must differ"
    assert len(seen) > 20
    assert max(map(len, seen.values())) <= num_shapes
    assert {len(shapes) for shapes in seen.values()} != {1}


def test_bins_fill_the_largest_shape() -> None:
    generator = np.random.default_rng(1)
    images = generator.integers(1, 3, 5000)
    many = SampleSizes(images * 256 + generator.integers(20, 150, 5000), images, num_actions=50)
    packer = SequenceLengthPacker()
    stream = BatchStream(ShuffledOrder(5000, seed=0), packer, many, num_ranks=1, samples_per_step=8)
    rows = [many.prefix_N[next(stream).ranks[0][0]].sum() for _ in range(500)]
    assert np.mean(rows) >= 0.99 * packer.shapes[-1].rows
    assert [shape.rows for shape in packer.shapes] == sorted(shape.rows for shape in packer.shapes)


def test_a_batch_of_another_origin_is_refused() -> None:
    policy = small_pi05()
    packer, _ = composed(num_shapes=2, samples_per_step=2)
    settings = FastPathSettings(packer, SegmentAuto())
    with pytest.raises(ValueError, match="larger than the largest shape ComputedShape"):
        run_fast(policy, random_batch(policy, [12] * 8), settings)


def test_inference_is_not_padded() -> None:
    policy = small_pi05()
    packer, _ = composed(num_shapes=2)
    batch = random_batch(policy, [12, 3])
    noise = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    actions = []
    for chosen in (packer, PaddingFreePacker()):
        installation = Pi05Wrapper().install(policy, FastPathSettings(chosen, SegmentAuto()))
        actions.append(policy.predict_action_chunk(batch, noise=noise))
        installation.uninstall()
    assert torch.equal(*actions)
