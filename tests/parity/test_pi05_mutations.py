# SPDX-License-Identifier: Apache-2.0
"""Mutation twins: drop one mask or boundary of the packed π0.5, and parity with upstream must break."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from embodix.attention import Segments
from embodix.attention.cpu import SegmentAuto
from embodix.packing.layout import PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix.testing.errors import compare_gradients
from embodix_pi05 import attention, fast_path, layers, prefix
from embodix_pi05.testing import random_batch, run_fast, run_upstream, small_pi05

FAST = FastPathSettings(PaddingFreePacker(), SegmentAuto())


@pytest.fixture(scope="module")
def case():
    policy = small_pi05(empty_cameras=1)
    batch = random_batch(policy, [3, 12, 7], camera_is_pad=[[False, True], [False, False], [True, False]])
    return policy, batch, run_upstream(policy, batch)


def distance(case, settings=FAST):
    policy, batch, wanted = case
    got = run_fast(policy, batch, settings)
    comparison = compare_gradients(got.gradients, wanted.gradients)
    return max(abs(got.loss - wanted.loss) / wanted.loss, comparison.whole)


def test_nothing_dropped_is_exact(case):
    assert distance(case) < 1e-5


def test_dropping_the_boundary_between_samples_is_noticed(case, monkeypatch):
    class Merged(Segments):
        @classmethod
        def from_lengths(cls, lengths_q, lengths_k, device="cpu"):
            return Segments.from_lengths((sum(lengths_q),), (sum(lengths_k),), device)

    monkeypatch.setattr(attention, "Segments", Merged)
    assert distance(case) > 1e-3


def test_dropping_the_camera_mask_is_noticed(case, monkeypatch):
    def all_present(*arguments):
        found = prefix.collect_cameras(*arguments)
        return dataclasses.replace(found, present_BC=torch.ones_like(found.present_BC))

    monkeypatch.setattr(fast_path, "collect_cameras", all_present)
    settings = dataclasses.replace(FAST, vision_tokens="upstream")
    assert distance(case, settings) > 1e-3


def test_dropping_the_language_mask_is_noticed(case):
    policy, batch, wanted = case
    unmasked = {**batch, "observation.language.attention_mask": torch.ones(3, 12, dtype=torch.bool)}
    assert distance((policy, unmasked, wanted)) > 1e-3


def test_dropping_the_split_of_prefix_and_suffix_is_noticed(case, monkeypatch):
    """The prefix sees the action tokens too."""

    class Joint(attention.VarlenPrefixLm):
        def suffix(self, q, prefix_kv, suffix_kv, scale):
            self._joint = [
                torch.cat(pair).index_select(0, self._joint_rows) for pair in zip(prefix_kv, suffix_kv, strict=True)
            ]
            return super().suffix(q, prefix_kv, suffix_kv, scale)

        def prefix(self, q, k, v, scale):
            lengths = self._prefix_segments.lengths_q, self._suffix_segments.lengths_k
            return self._backend(q, *self._joint, Segments.from_lengths(*lengths), scale=scale)

    monkeypatch.setattr(layers, "VarlenPrefixLm", Joint)
    assert distance(case) > 1e-3


def test_an_action_block_that_sees_only_itself_is_noticed(case, monkeypatch):
    class Blind(attention.VarlenPrefixLm):
        def suffix(self, q, prefix_kv, suffix_kv, scale):
            lengths = self._suffix_segments.lengths_q
            return self._backend(q, *suffix_kv, Segments.from_lengths(lengths, lengths), scale=scale)

    monkeypatch.setattr(layers, "VarlenPrefixLm", Blind)
    assert distance(case) > 1e-3


def test_positions_that_run_on_over_samples_are_noticed(case, monkeypatch):
    tables = layers.rope_tables
    monkeypatch.setattr(
        layers, "rope_tables", lambda rotary, like, positions: tables(rotary, like, torch.arange(len(positions)))
    )
    assert distance(case) > 1e-3


def test_a_missing_zero_gradient_is_noticed(case, monkeypatch):
    monkeypatch.setattr(layers, "with_zero_gradients", lambda value, *_: value)
    policy, batch, wanted = case
    structure = compare_gradients(run_fast(policy, batch, FAST).gradients, wanted.gradients).structure
    assert structure == [
        "model.paligemma_with_expert.paligemma.model.language_model.layers.2.self_attn.q_proj.weight: "
        "None on one side only"
    ]


def test_a_neighbour_changes_no_other_sample(case):
    policy, batch, _ = case
    from embodix_pi05.wrapper import Pi05Wrapper

    installation = Pi05Wrapper().install(policy, FAST)
    poisoned = {key: value.clone() for key, value in batch.items()}
    poisoned["observation.images.front"][1] = float("nan")
    per_sample = []
    for given in (batch, poisoned):
        torch.manual_seed(0)
        per_sample.append(policy.forward(given, reduction="none")[0].detach())
    installation.uninstall()
    clean, changed = per_sample
    assert torch.isnan(changed[1])
    torch.testing.assert_close(changed[[0, 2]], clean[[0, 2]], rtol=0, atol=0)
