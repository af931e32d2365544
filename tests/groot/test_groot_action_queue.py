# SPDX-License-Identifier: Apache-2.0
"""Which actions of a chunk GR00T plays, plain and repaired, with and without the fast path."""

from __future__ import annotations

import pytest
import torch

from embodix.attention.cpu import SegmentAuto
from embodix.packing.layout import PaddingFreePacker
from embodix.patching import patched
from embodix.policies.settings import FastPathSettings
from embodix_groot.testing import random_batch, small_groot
from embodix_groot.wrapper import GrootN15Wrapper


@pytest.fixture
def case():
    """A policy that plays 8 of 16 actions, a batch without padding, and the chunk predicted for it."""
    policy = small_groot(n_action_steps=8)
    batch = random_batch(policy, [6, 6], [2, 2])
    torch.manual_seed(0)
    return policy, batch, policy.predict_action_chunk(batch)


def play(policy, batch, num_actions):
    policy.reset()
    torch.manual_seed(0)
    return torch.stack([policy.select_action(batch) for _ in range(num_actions)], dim=1)


def test_upstream_plays_the_last_actions_and_the_patch_the_first(case):
    policy, batch, chunk = case
    assert torch.equal(play(policy, batch, 8), chunk[:, 8:])
    with patched({"lerobot_groot_action_queue": {}}):
        assert torch.equal(play(policy, batch, 8), chunk[:, :8])
        assert not torch.equal(play(policy, batch, 9)[:, 8], chunk[:, 8])
        assert "predict_action_chunk" not in policy.__dict__
    assert torch.equal(play(policy, batch, 8), chunk[:, 8:])


def test_a_policy_that_plays_whole_chunks_is_left_as_it_is():
    policy = small_groot(n_action_steps=16)
    batch = random_batch(policy, [4, 6], [1, 2])
    wanted = play(policy, batch, 16)
    with patched({"lerobot_groot_action_queue": {}}):
        assert torch.equal(play(policy, batch, 16), wanted)


def test_the_patch_leaves_an_installed_fast_path_in_place(case):
    policy, batch, chunk = case
    installation = GrootN15Wrapper().install(policy, FastPathSettings(PaddingFreePacker(), SegmentAuto()))
    with patched({"lerobot_groot_action_queue": {}}):
        played = play(policy, batch, 8)
    assert policy.predict_action_chunk.func.__self__ is installation.fast_path
    torch.testing.assert_close(played, chunk[:, :8], rtol=0, atol=1e-5)
    installation.uninstall()
