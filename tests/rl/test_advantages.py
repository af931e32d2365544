# SPDX-License-Identifier: Apache-2.0
"""Advantages against their definitions; steps and episodes that do not count reach nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodix_rl.objectives.advantages import Transitions, generalized_advantages, group_advantages, next_values
from embodix_rl.objectives.moments import Moments

DISCOUNT, LAMBDA = 0.9, 0.8


def transitions(num_steps=6, num_envs=3, seed=0, **changes):
    torch.manual_seed(seed)
    shape = (num_steps, num_envs)
    values = torch.randn(shape)
    never = torch.zeros(shape, dtype=torch.bool)
    following = next_values(values, torch.randn(num_envs), torch.zeros(shape), never)
    steps = Transitions(torch.randn(shape), values, following, never, never, ~never)
    return dataclasses.replace(steps, **changes)


def by_definition(steps, env):
    """The sum over each step's future, up to the end of its episode."""
    rewards, values, following = (getattr(steps, f"{name}_SB")[:, env] for name in ("rewards", "values", "next_values"))
    advantages = []
    for start in range(len(rewards)):
        total, weight = 0.0, 1.0
        for step in range(start, len(rewards)):
            if not steps.valid_SB[step, env]:
                break
            terminated = bool(steps.terminated_SB[step, env])
            total += weight * float(rewards[step] + DISCOUNT * following[step] * (not terminated) - values[step])
            if terminated or steps.truncated_SB[step, env]:
                break
            weight *= DISCOUNT * LAMBDA
        advantages.append(total)
    return advantages


def some(seed, num_steps=6, num_envs=3, share=0.3):
    return torch.rand(num_steps, num_envs, generator=torch.Generator().manual_seed(seed)) < share


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 1000))
def test_gae_is_its_definition_with_ends_and_invalid_steps(seed):
    steps = transitions(seed=seed)
    ends = some(seed + 1)
    steps = dataclasses.replace(
        steps, terminated_SB=ends & some(seed + 2, share=0.5), truncated_SB=ends, valid_SB=~some(seed + 3, share=0.2)
    )
    advantages, returns = generalized_advantages(steps, DISCOUNT, LAMBDA)
    for env in range(3):
        torch.testing.assert_close(advantages[:, env], torch.tensor(by_definition(steps, env)), rtol=1e-5, atol=1e-5)
    wanted = torch.where(steps.valid_SB, advantages + steps.values_SB, 0.0)
    assert torch.equal(returns, wanted)


def test_a_truncation_is_worth_what_would_have_followed_and_a_termination_nothing():
    ends = torch.zeros(6, 3, dtype=torch.bool)
    ends[2] = True
    steps = transitions()
    final = torch.full((6, 3), 7.0)
    following = next_values(steps.values_SB, torch.randn(3), final, ends)
    assert torch.equal(following[2], torch.full((3,), 7.0))
    assert torch.equal(following[1], steps.values_SB[2])
    steps = dataclasses.replace(steps, next_values_SB=following)
    truncated, _ = generalized_advantages(dataclasses.replace(steps, truncated_SB=ends), DISCOUNT, LAMBDA)
    terminated, _ = generalized_advantages(dataclasses.replace(steps, terminated_SB=ends), DISCOUNT, LAMBDA)
    torch.testing.assert_close(truncated[2] - terminated[2], torch.full((3,), DISCOUNT * 7.0))
    assert torch.equal(truncated[3:], terminated[3:])
    plain, _ = generalized_advantages(steps, DISCOUNT, LAMBDA)
    assert not torch.allclose(plain[:3], truncated[:3], atol=1e-2)


def test_invalid_steps_may_hold_anything():
    valid = ~some(5, share=0.4)
    steps = transitions(valid_SB=valid)
    clean = generalized_advantages(steps, DISCOUNT, LAMBDA)
    parts = {name: getattr(steps, name).masked_fill(~valid, float("nan")) for name in ("rewards_SB", "values_SB")}
    poisoned = generalized_advantages(dataclasses.replace(steps, **parts), DISCOUNT, LAMBDA)
    assert all(torch.equal(*pair) for pair in zip(clean, poisoned, strict=True))
    assert not clean[0][~valid].any()
    counted = generalized_advantages(dataclasses.replace(steps, valid_SB=torch.ones_like(valid)), DISCOUNT, LAMBDA)
    assert not torch.allclose(counted[0][valid], clean[0][valid], atol=1e-2)


def test_transitions_have_one_shape():
    with pytest.raises(ValueError, match=r"rewards_SB.*\(6, 2\)"):
        transitions(rewards_SB=torch.zeros(6, 2))


def test_group_advantages_are_those_of_the_group():
    scores = torch.tensor([1.0, 0.0, 3.0, 5.0, 2.0, 4.0])
    groups = torch.tensor([4, 9, 4, 9, 4, 9])
    got = group_advantages(scores, groups, torch.ones(6, dtype=torch.bool))
    for group in (4, 9):
        members = scores[groups == group]
        wanted = (members - members.mean()) / (members.std() + 1e-6)
        torch.testing.assert_close(got[groups == group], wanted)
    unscaled = group_advantages(scores, groups, torch.ones(6, dtype=torch.bool), scaled=False)
    torch.testing.assert_close(unscaled[groups == 4], torch.tensor([-1.0, 1.0, 0.0]))


def test_a_masked_member_changes_nothing_for_the_others_of_its_group():
    scores = torch.tensor([1.0, 0.0, 3.0, float("nan"), 5.0, 5.0, 1.0, float("nan")])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    valid = ~scores.isnan()
    got = group_advantages(scores, groups, valid)
    alone = group_advantages(scores[:3], groups[:3], valid[:3])
    assert torch.equal(got[:3], alone)
    assert got[3:].tolist() == [0.0] * 5  # masked; all alike; one member left, and the masked one
    counted = group_advantages(scores.nan_to_num(9.0), groups, torch.ones(8, dtype=torch.bool))
    assert not torch.allclose(counted[:3], alone, atol=0.1)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.integers(0, 1000))
def test_parts_of_a_batch_give_the_moments_of_the_whole(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    values = 100.0 + torch.randn(sum(sizes), generator=generator)
    valid = torch.rand(sum(sizes), generator=generator) < 0.7
    merged = Moments()
    for part, mask in zip(values.split(sizes), valid.split(sizes), strict=True):
        merged = merged + Moments.from_tensor(Moments.of(part, mask).to_tensor())
    whole = Moments.of(values, valid)
    assert merged.count == whole.count == int(valid.sum())
    assert merged.mean == pytest.approx(whole.mean, abs=1e-12 * 100)
    assert merged.std == pytest.approx(whole.std, abs=1e-9)
    chosen = values[valid].double()
    if chosen.numel() > 1:
        torch.testing.assert_close(
            merged.normalise(values.double(), valid)[valid], (chosen - chosen.mean()) / (chosen.std() + 1e-5)
        )


def test_normalising_each_part_by_itself_is_something_else():
    values, valid = torch.tensor([1.0, 2.0, 10.0, 12.0]), torch.ones(4, dtype=torch.bool)
    whole = Moments.of(values, valid).normalise(values, valid)
    parts = torch.cat(
        [
            Moments.of(part, mask).normalise(part, mask)
            for part, mask in ((values[:2], valid[:2]), (values[2:], valid[2:]))
        ]
    )
    assert not torch.allclose(whole, parts, atol=0.1)
    masked = Moments.of(values, valid).normalise(
        values.masked_fill(~valid, float("nan")), torch.zeros(4, dtype=torch.bool)
    )
    assert masked.tolist() == [0.0] * 4
