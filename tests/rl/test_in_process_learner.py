# SPDX-License-Identifier: Apache-2.0
"""Advantages of benchmarks/rl_in_process.py against their definitions; what does not count reaches nothing."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

SPEC = importlib.util.spec_from_file_location(
    "in_process_learner", Path(__file__).parents[2] / "benchmarks" / "in_process_learner.py"
)
learner = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = learner  # dataclasses look their module up
SPEC.loader.exec_module(learner)
Transitions, normalised = learner.Transitions, learner.normalised
generalized_advantages, group_advantages = learner.generalized_advantages, learner.group_advantages
DISCOUNT, LAMBDA = 0.9, 0.8


def transitions(num_steps=6, num_envs=3, seed=0, **changes):
    torch.manual_seed(seed)
    shape = (num_steps, num_envs)
    values = torch.randn(shape)
    never = torch.zeros(shape, dtype=torch.bool)
    following = torch.cat([values[1:], torch.randn(1, num_envs)])
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
    steps = dataclasses.replace(steps, next_values_SB=torch.where(ends, 7.0, steps.next_values_SB))
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


def test_normalising_is_over_the_valid_ones_of_the_whole():
    values, valid = torch.tensor([1.0, 2.0, 10.0, 12.0]), torch.tensor([True, False, True, True])
    whole, chosen = normalised(values.masked_fill(~valid, float("nan")), valid), values[valid]
    torch.testing.assert_close(whole[valid], (chosen - chosen.mean()) / (chosen.std() + 1e-5))
    assert not whole[~valid].any()
    parts = torch.cat([normalised(values[:2], valid[:2]), normalised(values[2:], valid[2:])])
    assert not torch.allclose(whole, parts, atol=0.1)
    assert normalised(values, torch.zeros_like(valid)).tolist() == [0.0] * 4


def test_the_explained_variance():
    returns = torch.tensor([2.0, 1.0, 0.0])
    assert learner.explained_variance(returns, returns) == pytest.approx(1.0)
    assert learner.explained_variance(returns, torch.zeros(3)) != learner.explained_variance(returns, returns)
