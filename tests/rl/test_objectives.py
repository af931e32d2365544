# SPDX-License-Identifier: Apache-2.0
"""The losses against their formulas by hand, and against plain PPO where nothing is stale."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from embodix_rl.objectives.objective import (
    ObjectiveSettings,
    SampledChunks,
    ValueLossSettings,
    at_level,
    chunk_losses,
    value_loss,
)
from embodix_rl.objectives.policy_loss import PolicyLossSettings, RatioStatistics, policy_loss, ratio_statistics

PLAIN = PolicyLossSettings(dual_clip=None, behaviour_cap=None)
YES = torch.ones(1, dtype=torch.bool)


@pytest.fixture(autouse=True)
def seeded():
    """What tests draw doesn't depend on those that ran before."""
    torch.manual_seed(0)


def drawn(*shape, seed=0, scale=0.3):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator) for _ in range(3)]


def loss_and_slope(ratio, advantage, settings=PLAIN, weight=1.0):
    """Loss of one chunk, and its gradient in the log-probability."""
    current = torch.tensor([math.log(ratio)], requires_grad=True)
    behaviour = torch.tensor([-math.log(weight)])
    loss, _ = policy_loss(
        current, behaviour, torch.tensor([advantage]), YES, settings, proximal_log_probs=torch.zeros(1)
    )
    loss.backward()
    return loss.item(), current.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "wanted"),
    [
        (1.1, 2.0, (-2.2, -2.2)),  # within the clip: the gradient is that of -A r
        (1.5, 2.0, (-2.4, 0.0)),  # gained enough
        (0.5, 2.0, (-1.0, -1.0)),  # lost: pulled back
        (0.5, -2.0, (1.6, 0.0)),
        (1.5, -2.0, (3.0, 3.0)),
    ],
)
def test_the_clipped_loss_and_its_gradient_by_hand(ratio, advantage, wanted):
    assert loss_and_slope(ratio, advantage) == pytest.approx(wanted, rel=1e-5)


def test_the_dual_clip_bounds_the_loss_of_a_bad_chunk():
    dual = dataclasses.replace(PLAIN, dual_clip=3.0)
    assert loss_and_slope(10.0, -2.0) == pytest.approx((20.0, 20.0), rel=1e-5)
    assert loss_and_slope(10.0, -2.0, dual) == pytest.approx((6.0, 0.0))
    assert loss_and_slope(10.0, 2.0, dual) == loss_and_slope(10.0, 2.0)
    assert loss_and_slope(2.5, -2.0, dual) == loss_and_slope(2.5, -2.0)


def test_a_stale_chunk_is_weighted_by_the_proximal_policy_up_to_the_cap():
    capped = dataclasses.replace(PLAIN, behaviour_cap=5.0)
    assert loss_and_slope(1.1, 2.0, capped, weight=3.0) == pytest.approx((-6.6, -6.6), rel=1e-5)
    assert loss_and_slope(1.1, 2.0, capped, weight=8.0) == pytest.approx((-11.0, -11.0), rel=1e-5)
    assert loss_and_slope(1.1, 2.0, PLAIN, weight=8.0) == pytest.approx((-17.6, -17.6), rel=1e-5)


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 3, 2)])
def test_without_staleness_the_decoupled_loss_is_plain_ppo_to_the_bit(shape):
    behaviour, moved, _ = drawn(*shape)
    advantages, valid = drawn(6, scale=1.0)[0], torch.tensor([True, True, False, True, True, True])
    settings = PolicyLossSettings()

    def run(proximal):
        current = (behaviour + moved).requires_grad_()
        loss, statistics = policy_loss(current, behaviour, advantages, valid, settings, proximal_log_probs=proximal)
        loss.backward()
        return loss, current.grad, statistics

    plain, decoupled = run(None), run(behaviour.clone())
    assert torch.equal(plain[0], decoupled[0])
    assert torch.equal(plain[1], decoupled[1])
    assert plain[2] == decoupled[2]
    ratio = moved[valid].exp()
    spread = advantages[valid].reshape(-1, *[1] * (len(shape) - 1))
    losses = torch.maximum(-spread * ratio, -spread * ratio.clamp(0.8, 1.2)).minimum(3.0 * spread.abs())
    torch.testing.assert_close(plain[0], losses.mean(), rtol=1e-6, atol=1e-7)
    stale = run(behaviour + 0.1)
    assert not torch.allclose(stale[0], plain[0], rtol=1e-3)


@pytest.mark.parametrize("poison", [3.0, float("nan"), float("inf")])
def test_chunks_that_do_not_count_have_no_weight_whatever_they_hold(poison):
    valid = torch.tensor([True, False, True, False])
    settings = ObjectiveSettings(entropy_weight=0.1, value=ValueLossSettings(clip=0.2))

    def run(hole, counted=valid):
        torch.manual_seed(0)
        parts = [0.02 * torch.randn(4, 3, 2) for _ in range(3)] + [torch.randn(4) for _ in range(5)]
        for part in parts:
            part[~valid] = part[~valid] if hole is None else hole
        log_probs, behaviour, proximal, advantages, returns, before, values, entropy = parts
        sampled = SampledChunks(behaviour, advantages, counted, returns, before, proximal)
        log_probs.requires_grad_(), values.requires_grad_()
        losses = chunk_losses(sampled, log_probs, entropy, values, settings)
        losses.total.backward()
        return losses, log_probs.grad, values.grad

    clean, poisoned = run(None), run(poison)
    assert torch.equal(clean[0].total, poisoned[0].total)
    assert clean[0].ratios == poisoned[0].ratios
    for gradient, other in zip(clean[1:], poisoned[1:], strict=True):
        assert torch.equal(gradient, other)
        assert not gradient[~valid].any()
        assert gradient[valid].any()
    everything = run(None, torch.ones(4, dtype=torch.bool))
    assert not torch.allclose(everything[0].total, clean[0].total, rtol=1e-2)


def test_micro_batches_add_up_to_the_batch():
    torch.manual_seed(0)
    valid = torch.tensor([True, False, True, True, False, True, False])
    behaviour, proximal = torch.randn(7, 3, 2), torch.randn(7, 3, 2)
    sampled = SampledChunks(behaviour, torch.randn(7), valid, torch.randn(7), torch.randn(7), proximal)
    current, entropy, values = torch.randn(7, 3, 2), torch.randn(7), torch.randn(7)
    settings = ObjectiveSettings(entropy_weight=0.1)
    whole = chunk_losses(sampled, current, entropy, values, settings)
    parts = [
        chunk_losses(sampled[rows], current[rows], entropy[rows], values[rows], settings, num_valid=4)
        for rows in (torch.tensor([0, 4, 1]), torch.tensor([6]), torch.tensor([2, 3, 5]))
    ]
    torch.testing.assert_close(sum(part.total for part in parts), whole.total)
    assert sum(part.value for part in parts) == pytest.approx(whole.value, rel=1e-5)
    merged = sum((part.ratios for part in parts), RatioStatistics())
    assert merged.metrics() == pytest.approx(whole.ratios.metrics(), rel=1e-9)
    assert parts[1].total.item() == 0.0


def test_levels_sum_over_what_is_decided_together():
    log_probs = torch.randn(4, 3, 2)
    assert torch.equal(at_level(log_probs, "element"), log_probs)
    torch.testing.assert_close(at_level(log_probs, "action"), log_probs.sum(-1))
    torch.testing.assert_close(at_level(log_probs, "chunk"), log_probs.sum((1, 2)))
    with pytest.raises(ValueError, match="chunk, action, element; got 'token'"):
        at_level(log_probs, "token")


def test_ratio_metrics_by_hand():
    ratios = torch.tensor([1.0, 2.0, 0.5, 40.0])
    valid = torch.tensor([True, True, True, False])
    metrics = ratio_statistics(ratios.log(), torch.zeros(4), valid).metrics()
    assert metrics["ratio_mean"] == pytest.approx(3.5 / 3)
    assert metrics["ratio_max"] == pytest.approx(2.0)
    assert metrics["effective_sample_share"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert metrics["approx_kl"] == pytest.approx(3.5 / 3 - 1)
    _, statistics = policy_loss(
        torch.tensor([1.5, 0.5, 5.0, 1.0]).log(),
        torch.tensor([1.0, 1.0, 1.0, 0.1]).log(),
        torch.tensor([1.0, 1.0, -1.0, 1.0]),
        torch.ones(4, dtype=torch.bool),
        PolicyLossSettings(),
        proximal_log_probs=torch.zeros(4),
    )
    metrics = statistics.metrics()
    assert (metrics["clip_fraction"], metrics["dual_clip_fraction"], metrics["cap_fraction"]) == (0.25, 0.25, 0.25)
    assert metrics["behaviour_weight_mean"] == pytest.approx(13 / 4)
    assert RatioStatistics().metrics() == {}


def test_huge_ratios_stay_finite():
    current = torch.tensor([400.0, -400.0, 400.0], requires_grad=True)
    loss, statistics = policy_loss(
        current, torch.zeros(3), torch.tensor([1.0, -1.0, 0.0]), torch.ones(3, dtype=torch.bool), PolicyLossSettings()
    )
    loss.backward()
    assert loss.isfinite() and current.grad.isfinite().all()
    assert all(math.isfinite(value) for value in statistics.metrics().values())


def test_the_value_loss_by_hand():
    values = torch.tensor([1.0, 4.0, 9.0], requires_grad=True)
    returns, before, valid = (
        torch.tensor([2.0, 1.0, 0.0]),
        torch.tensor([1.0, 1.0, 0.0]),
        torch.tensor([1, 1, 0]).bool(),
    )
    squared = value_loss(values, returns, before, valid, ValueLossSettings(huber_delta=None))
    assert squared.item() == pytest.approx((0.5 + 4.5) / 2)
    huber = value_loss(values, returns, before, valid, ValueLossSettings(huber_delta=1.0))
    assert huber.item() == pytest.approx((0.5 + 2.5) / 2)
    # Clipped: 4 may be 1.2 at most, whose error is smaller, so the larger one counts; 0.5 stays.
    clipped = value_loss(values, returns, before, valid, ValueLossSettings(clip=0.2, huber_delta=None))
    assert clipped.item() == pytest.approx((0.5 + 4.5) / 2)
    towards = torch.tensor([1.9], requires_grad=True)
    kept = value_loss(towards, torch.tensor([2.0]), torch.tensor([1.0]), YES, ValueLossSettings(0.2, None))
    kept.backward()
    assert (kept.item(), towards.grad.item()) == (pytest.approx(0.5 * 0.8**2), 0.0)  # moved far enough: no gradient


@pytest.mark.parametrize(
    ("settings", "choices", "message"),
    [
        (PolicyLossSettings, {"clip_low": 1.0}, "between 0 and 1"),
        (PolicyLossSettings, {"dual_clip": 1.0}, "above 1, or null"),
        (PolicyLossSettings, {"behaviour_cap": 0.5}, "1 at least"),
        (ValueLossSettings, {"clip": 0.0}, "clip of the value loss is positive"),
    ],
)
def test_settings_refuse_what_makes_no_sense(settings, choices, message):
    with pytest.raises(ValueError, match=message):
        settings(**choices)


def test_what_the_settings_need_must_be_there():
    sampled = SampledChunks(torch.zeros(1, 1, 1), torch.zeros(1), YES)
    current = (torch.zeros(1, 1, 1), torch.zeros(1), None)
    with pytest.raises(ValueError, match="proximal policy"):
        chunk_losses(sampled, *current, ObjectiveSettings())
    known = dataclasses.replace(sampled, proximal_log_probs_BTA=torch.zeros(1, 1, 1))
    with pytest.raises(ValueError, match="algorithm=grpo"):
        chunk_losses(known, *current, ObjectiveSettings())
    losses = chunk_losses(known, *current, ObjectiveSettings(value=None))
    assert losses.total.item() == 0.0
