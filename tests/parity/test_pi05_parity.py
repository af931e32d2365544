# SPDX-License-Identifier: Apache-2.0
"""The packed π0.5 computes what upstream computes: loss, gradients, random stream and actions."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodix.attention.cpu import SegmentAuto, SegmentGemm, SegmentSdpa
from embodix.packing.layout import PaddedPacker, PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix.testing.errors import compare_gradients
from embodix_pi05.testing import fast_actions, random_batch, run_fast, run_upstream, small_pi05, upstream_actions

LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5
ACTION_TOLERANCE = 1e-5
FAST = FastPathSettings(PaddingFreePacker(), SegmentAuto(), "valid")


@cache
def policy_with(**config):
    return small_pi05(**dict(config))


def assert_same_training(policy, batch, choice, seed=0):
    wanted, got = run_upstream(policy, batch, seed), run_fast(policy, batch, choice, seed)
    assert got.loss == pytest.approx(wanted.loss, rel=LOSS_TOLERANCE)
    comparison = compare_gradients(got.gradients, wanted.gradients)
    assert comparison.structure == []
    assert comparison.worst <= GRADIENT_TOLERANCE, comparison.worst_name
    assert torch.equal(got.random_state, wanted.random_state)


@st.composite
def situations(draw):
    batch_size = draw(st.integers(1, 4))
    prompts = draw(st.lists(st.integers(0, 12), min_size=batch_size, max_size=batch_size))
    cameras = draw(st.sampled_from([("front",), ("gripper",), ("front", "gripper")]))
    row = st.lists(st.booleans(), min_size=len(cameras), max_size=len(cameras)).filter(lambda row: not all(row))
    absent = draw(st.none() | st.lists(row, min_size=batch_size, max_size=batch_size))
    return prompts, cameras, absent, draw(st.integers(0, 1)), draw(st.integers(0, 1000))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(situations())
def test_training_and_actions_equal_upstream_on_random_batches(situation):
    prompts, cameras, absent, empty_cameras, seed = situation
    policy = policy_with(empty_cameras=empty_cameras)
    batch = random_batch(policy, prompts, cameras=cameras, camera_is_pad=absent, seed=seed)
    assert_same_training(policy, batch, FAST, seed)
    wanted = upstream_actions(policy, batch, seed)
    got = fast_actions(policy, batch, FAST, seed)
    torch.testing.assert_close(got, wanted, rtol=0, atol=ACTION_TOLERANCE)


@pytest.mark.parametrize("packer", [PaddedPacker, PaddingFreePacker])
@pytest.mark.parametrize("attention", [None, SegmentGemm, SegmentSdpa])
@pytest.mark.parametrize("vision_tokens", ["upstream", "valid"])
def test_every_combination_of_features_is_exact(packer, attention, vision_tokens):
    policy = policy_with(empty_cameras=1)
    batch = random_batch(policy, [3, 12, 7], camera_is_pad=[[False, False], [True, False], [False, True]])
    choice = FastPathSettings(packer(), attention and attention(), vision_tokens)
    assert_same_training(policy, batch, choice)
    got, wanted = fast_actions(policy, batch, choice), upstream_actions(policy, batch)
    torch.testing.assert_close(got, wanted, rtol=0, atol=ACTION_TOLERANCE)


@pytest.mark.parametrize(
    "config",
    [
        {"freeze_vision_encoder": True},
        {"train_expert_only": True},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "freeze_vision_encoder": True},
        {"chunk_size": 1, "n_action_steps": 1},
    ],
    ids=str,
)
def test_every_training_config_is_exact(config):
    policy = policy_with(empty_cameras=1, **config)
    assert_same_training(policy, random_batch(policy, [4, 9]), FAST)
