# SPDX-License-Identifier: Apache-2.0
"""Mutation twins: drop one mask or boundary of the packed GR00T, and parity with upstream must break."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers.models.embeddings import SinusoidalPositionalEmbedding

from embodix.attention import Segments
from embodix.attention.cpu import SegmentAuto
from embodix.packing.layout import PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix.testing.errors import compare_gradients
from embodix_groot import action_head, backbone, fast_path
from embodix_groot.attention import DenseTokens, VarlenTokens
from embodix_groot.testing import random_batch, run_fast, run_reference, small_groot, strengthen
from embodix_groot.wrapper import GrootN15Wrapper

FAST = FastPathSettings(PaddingFreePacker(), SegmentAuto())
DENSE = FastPathSettings(PaddingFreePacker(), None)


@pytest.fixture(scope="module")
def case():
    policy = strengthen(small_groot(tune_llm=True, tune_visual=True))
    batch = random_batch(policy, [5, 12, 7], [1, 2, 3])
    return policy, batch, run_reference(policy, batch)


def distance(case, settings=FAST):
    policy, batch, wanted = case
    got = run_fast(policy, batch, settings)
    comparison = compare_gradients(got.gradients, wanted.gradients)
    return max(abs(got.loss - wanted.loss) / wanted.loss, comparison.whole)


@pytest.mark.parametrize("settings", [FAST, DENSE], ids=["varlen", "dense"])
def test_nothing_dropped_is_exact(case, settings):
    assert distance(case, settings) < 1e-5


def merged(segments):
    return Segments.from_lengths((sum(segments.lengths_q),), (sum(segments.lengths_k),))


class Changed(VarlenTokens):
    """Attention with one boundary or flag changed, for the language model or for the action head."""

    drop_boundaries_of = None
    causal_as = None
    merge_queries = False

    def among_tokens(self, q, k, v, *, causal):
        segments = self._token_segments
        if self.drop_boundaries_of == ("language" if causal else "features"):
            segments = merged(segments)
        return self._backend(q, k, v, segments, causal=causal if self.causal_as is None else self.causal_as)

    def over_tokens(self, q, k, v):
        return self._backend(q, k, v, merged(self._query_segments) if self.merge_queries else self._query_segments)


@pytest.mark.parametrize(
    "change",
    [
        {"drop_boundaries_of": "language"},
        {"drop_boundaries_of": "features"},
        {"merge_queries": True},
        {"causal_as": False},
        {"causal_as": True},
    ],
    ids=str,
)
def test_dropping_a_boundary_or_the_causal_flag_is_noticed(case, change, monkeypatch):
    for name, value in change.items():
        monkeypatch.setattr(Changed, name, value)
    monkeypatch.setattr(fast_path, "VarlenTokens", Changed)
    assert distance(case) > 1e-3


@pytest.mark.parametrize("causal", [True, False])
def test_dropping_a_mask_of_dense_attention_is_noticed(case, causal, monkeypatch):
    class Unmasked(DenseTokens):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self._token_masks[causal] = torch.ones_like(self._token_masks[causal])

    monkeypatch.setattr(fast_path, "DenseTokens", Unmasked)
    assert distance(case, DENSE) > 1e-3


def test_dropping_the_key_mask_of_dense_cross_attention_is_noticed(case, monkeypatch):
    class Unmasked(DenseTokens):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self._key_mask = torch.ones_like(self._key_mask)

    monkeypatch.setattr(fast_path, "DenseTokens", Unmasked)
    assert distance(case, DENSE) > 1e-3


def test_taking_padding_for_tokens_is_noticed(case):
    policy, batch, wanted = case
    padded = {**batch, "eagle_attention_mask": torch.ones_like(batch["eagle_attention_mask"])}
    assert distance((policy, padded, wanted)) > 1e-3


def test_stretched_positions_of_the_language_model_are_noticed(case, monkeypatch):
    """RoPE sees differences of positions only: positions that merely run on over samples give the same numbers."""
    tables = backbone.rope_tables
    monkeypatch.setattr(backbone, "rope_tables", lambda m, rows, positions: tables(m, rows, 2 * positions))
    assert distance(case) > 1e-3


def test_feature_positions_that_run_on_over_samples_are_noticed(case, monkeypatch):
    policy, batch, _ = case
    policy = copy.deepcopy(policy)
    for block in policy._groot_model.action_head.vl_self_attention.transformer_blocks:
        block.pos_embed = SinusoidalPositionalEmbedding(block.dim, max_seq_length=64)
    positioned = policy, batch, run_reference(policy, batch)
    assert distance(positioned) < 1e-5
    encode = action_head.encode_context
    monkeypatch.setattr(
        action_head,
        "encode_context",
        lambda head, rows, positions, attention: encode(head, rows, torch.arange(len(positions)), attention),
    )
    assert distance(positioned) > 1e-3


def test_dropping_the_action_mask_is_noticed(case, monkeypatch):
    reduce = fast_path.reduce_masked
    monkeypatch.setattr(fast_path, "reduce_masked", lambda losses, mask, *rest: reduce(losses, mask | True, *rest))
    assert distance(case) > 1e-3


def test_a_missing_zero_gradient_is_noticed(case, monkeypatch):
    monkeypatch.setattr(backbone, "with_zero_gradients", lambda value, *_: value)
    policy, batch, wanted = case
    structure = compare_gradients(run_fast(policy, batch, FAST).gradients, wanted.gradients).structure
    assert len(structure) == 11
    assert all("vision_model.head." in name and "None on one side only" in name for name in structure)


def losses_of_samples(policy, batch, settings=FAST):
    installation = GrootN15Wrapper().install(policy, settings)
    try:
        torch.manual_seed(0)
        return policy.forward(dict(batch), reduction="none")[0]
    finally:
        installation.uninstall()


def with_changed_neighbour(policy, batch, value):
    """Images, state and action of sample 1 replaced by ``value``."""
    changed = {key: tensor.clone() for key, tensor in batch.items()}
    changed["eagle_pixel_values"][1:3] = value
    changed["state"][1] = value
    changed["action"][1] = value
    return changed


@pytest.mark.parametrize("settings", [FAST, DENSE], ids=["varlen", "dense"])
def test_a_poisoned_neighbour_changes_no_other_loss(case, settings):
    policy, batch, _ = case
    clean = losses_of_samples(policy, batch, settings)
    poisoned = losses_of_samples(policy, with_changed_neighbour(policy, batch, float("nan")), settings)
    assert torch.isnan(poisoned[1])
    assert torch.equal(poisoned[[0, 2]], clean[[0, 2]])


def test_a_poisoned_token_changes_no_other_loss(case):
    policy, batch, _ = case
    policy = copy.deepcopy(policy)
    token = batch["eagle_input_ids"][1, -1]
    others = torch.cat([batch["eagle_input_ids"][0], batch["eagle_input_ids"][2]])
    assert token not in others
    clean = losses_of_samples(policy, batch)
    with torch.no_grad():
        policy._groot_model.backbone.eagle_model.get_input_embeddings().weight[token] = float("nan")
    poisoned = losses_of_samples(policy, batch)
    assert torch.isnan(poisoned[1])
    assert torch.equal(poisoned[[0, 2]], clean[[0, 2]])


def test_a_changed_neighbour_changes_no_gradient_of_another_sample(case):
    policy, batch, _ = case
    parameters = list(policy.parameters())
    gradients = [
        torch.autograd.grad(losses_of_samples(policy, given)[0], parameters, allow_unused=True)
        for given in (batch, with_changed_neighbour(policy, batch, 0.7))
    ]
    assert (
        losses_of_samples(policy, batch)[1] != losses_of_samples(policy, with_changed_neighbour(policy, batch, 0.7))[1]
    )
    for clean, changed in zip(*gradients, strict=True):
        assert (clean is None) == (changed is None)
        assert clean is None or torch.equal(clean, changed)
