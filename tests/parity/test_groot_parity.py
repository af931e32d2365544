# SPDX-License-Identifier: Apache-2.0
"""The packed GR00T computes what upstream computes one sample at a time: loss, gradients, random stream, actions."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from diffusers.models.embeddings import SinusoidalPositionalEmbedding
from hypothesis import given, settings
from hypothesis import strategies as st

from embodix.attention.cpu import SegmentAuto, SegmentGemm
from embodix.packing.layout import PaddedPacker, PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix.testing.errors import compare_gradients
from embodix_groot.testing import (
    SMALL_ARCHITECTURE,
    fast_actions,
    random_batch,
    reference_actions,
    run_fast,
    run_reference,
    run_upstream,
    small_groot,
    strengthen,
)

LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5
ACTION_TOLERANCE = 1e-5
FAST = FastPathSettings(PaddingFreePacker(), SegmentAuto())
TUNED = [(False, False), (True, False), (False, True), (True, True)]


@cache
def policy_with(tune_llm=False, tune_visual=False):
    return strengthen(small_groot(tune_llm=tune_llm, tune_visual=tune_visual))


def mixed_batch(policy, text_lengths=(5, 12, 7), num_images=(1, 3, 2), seed=0):
    """Different prompts, image counts and embodiments."""
    batch = random_batch(policy, text_lengths, num_images, seed)
    batch["embodiment_id"] = torch.tensor([31, 3, 17, 3][: len(text_lengths)])
    return batch


def assert_same(got, wanted):
    assert got.loss == pytest.approx(wanted.loss, rel=LOSS_TOLERANCE)
    comparison = compare_gradients(got.gradients, wanted.gradients)
    assert comparison.structure == []
    assert comparison.worst <= GRADIENT_TOLERANCE, comparison.worst_name
    assert torch.equal(got.random_state, wanted.random_state)


def assert_same_training(policy, batch, choice=FAST, seed=0):
    assert_same(run_fast(policy, batch, choice, seed), run_reference(policy, batch, seed))


@st.composite
def situations(draw):
    batch_size = draw(st.integers(1, 4))
    text_lengths = draw(st.lists(st.integers(2, 12), min_size=batch_size, max_size=batch_size))
    num_images = draw(st.lists(st.integers(1, 3), min_size=batch_size, max_size=batch_size))
    return text_lengths, num_images, draw(st.sampled_from(TUNED)), draw(st.integers(0, 1000))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(situations())
def test_training_and_actions_equal_upstream_on_random_batches(situation):
    text_lengths, num_images, tuned, seed = situation
    policy = policy_with(*tuned)
    batch = mixed_batch(policy, text_lengths, num_images, seed)
    assert_same_training(policy, batch, seed=seed)
    noise = torch.randn(batch["action"].shape)
    got, wanted = fast_actions(policy, batch, FAST, noise), reference_actions(policy, batch, noise)
    torch.testing.assert_close(got, wanted, rtol=0, atol=ACTION_TOLERANCE)


@pytest.mark.parametrize("packer", [PaddedPacker, PaddingFreePacker])
@pytest.mark.parametrize("attention", [None, SegmentAuto, SegmentGemm])
@pytest.mark.parametrize("vision_tokens", ["upstream", "valid"])
@pytest.mark.parametrize("action_pad", ["host", "mask"])
def test_every_combination_of_features_is_exact(packer, attention, vision_tokens, action_pad):
    policy = policy_with(True, True)
    batch = mixed_batch(policy)
    batch["action_is_pad"] = torch.zeros(batch["action"].shape[:2], dtype=torch.bool)
    choice = FastPathSettings(packer(), attention and attention(), vision_tokens, action_pad)
    assert_same_training(policy, batch, choice)
    noise = torch.randn(batch["action"].shape)
    got, wanted = fast_actions(policy, batch, choice, noise), reference_actions(policy, batch, noise)
    torch.testing.assert_close(got, wanted, rtol=0, atol=ACTION_TOLERANCE)


@pytest.mark.parametrize(("tune_llm", "tune_visual"), TUNED)
def test_every_choice_of_tuned_parts_is_exact(tune_llm, tune_visual):
    policy = policy_with(tune_llm, tune_visual)
    batch = mixed_batch(policy)
    assert_same_training(policy, batch)
    trained = {
        name.split(".")[1] for name, value in run_fast(policy, batch, FAST).gradients.items() if value is not None
    }
    assert trained == ({"action_head", "backbone"} if tune_llm or tune_visual else {"action_head"})


@pytest.mark.parametrize(("tune_llm", "tune_visual"), TUNED)
def test_a_batch_without_padding_equals_upstreams_own_batch(tune_llm, tune_visual):
    policy = policy_with(tune_llm, tune_visual)
    batch = mixed_batch(policy, (6, 6, 6), (2, 2, 2))
    assert_same(run_fast(policy, batch, FAST), run_upstream(policy, batch))


def test_dropout_draws_upstreams_masks_on_a_batch_without_padding():
    policy = strengthen(small_groot({**SMALL_ARCHITECTURE, "dropout": 0.2}, tune_llm=True))
    batch = mixed_batch(policy, (6, 6), (2, 2))
    wanted = run_upstream(policy, batch)
    assert_same(run_fast(policy, batch, FAST), wanted)
    policy.eval()
    assert run_fast(policy, batch, FAST).loss != pytest.approx(wanted.loss, rel=1e-3)


@pytest.mark.parametrize("part", ["projector", "diffusion_model"])
def test_a_frozen_part_of_the_action_head_is_exact(part):
    policy = strengthen(small_groot(**{f"tune_{part}": False}))
    assert_same_training(policy, mixed_batch(policy))


def positions_in_blocks(policy):
    head = policy._groot_model.action_head
    for block in (*head.vl_self_attention.transformer_blocks, *head.model.transformer_blocks):
        block.pos_embed = SinusoidalPositionalEmbedding(block.dim, max_seq_length=64)


def no_norm_of_features(policy):
    policy._groot_model.action_head.vlln = torch.nn.Identity()
    policy._groot_model.action_head.vl_self_attention = torch.nn.Identity()


def earlier_vision_layer(policy):
    policy._groot_model.backbone.eagle_model.select_layer = -2


def no_action_positions(policy):
    policy._groot_model.action_head.config.add_pos_embed = False


def cross_attention_only(policy):
    dit, width = policy._groot_model.action_head.model, policy._groot_model.action_head.vlln.normalized_shape[0]
    dit.register_to_config(interleave_self_attention=False)
    for block in dit.transformer_blocks[1::2]:
        block.attn1 = copy.deepcopy(dit.transformer_blocks[0].attn1)
        assert block.attn1.to_k.in_features == width


def projected_features(policy):
    width = policy._groot_model.action_head.vlln.normalized_shape[0]
    policy._groot_model.backbone.eagle_linear = torch.nn.Linear(width, width)


@pytest.mark.parametrize(
    "change",
    [
        positions_in_blocks,
        no_norm_of_features,
        earlier_vision_layer,
        no_action_positions,
        cross_attention_only,
        projected_features,
    ],
)
def test_every_model_that_upstream_can_be_configured_to_is_exact(change):
    policy = copy.deepcopy(policy_with(True, True))
    before = run_reference(policy, mixed_batch(policy)).loss
    change(policy)
    assert run_reference(policy, mixed_batch(policy)).loss != before
    assert_same_training(policy, mixed_batch(policy))
