# SPDX-License-Identifier: Apache-2.0
"""Stochastic denoising steps keep the marginals of the ODE, and draw what they say.

The flow is analytic: data N(MEAN, SPREAD^2), for which the velocity is linear in the state. Every step is then a linear
map plus noise, so mean and variance after it follow exactly, without sampling.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from embodix.policies.flow_host import FlowSizes
from embodix_rl.flow.chain import (
    ChainPlan,
    ChainSettings,
    TransitionTable,
    draw_chain_noise,
    gaussian_entropy,
    gaussian_log_prob,
    run_chain,
    run_ode,
    transition_table,
)

MEAN, SPREAD = 0.7, 0.3


def sizes_of(num_steps, **changes):
    sizes = FlowSizes(
        num_steps, num_predicted=1, num_executed=1, padded_dims=1, action_dims=1, prefix_width=1, action_width=1
    )
    return dataclasses.replace(sizes, **changes)


def velocity(x, time):
    """Expected noise minus expected action given the state."""
    variance = time**2 + ((1 - time) * SPREAD) ** 2
    deviation = (x - (1 - time) * MEAN) / variance
    return time * deviation - (MEAN + (1 - time) * SPREAD**2 * deviation)


class AnalyticFlow:
    """The flow of N(MEAN, SPREAD^2) as a policy would offer it."""

    noise_dtype = torch.float32

    def __init__(self, num_steps):
        self.num_steps = num_steps

    def step(self, x, step):
        time = 1 - step[:, None, None] / self.num_steps
        return velocity(x, time), x.new_zeros(x.shape[0], 1)


def moments_after(table: TransitionTable, stochastic):
    """Exact mean and variance at the end, ``stochastic`` steps drawn and the others deterministic."""
    num_steps = table.num_steps
    mean, variance = torch.zeros(()).double(), torch.ones(()).double()
    table = TransitionTable(table.pull_K.double(), table.std_K.double())
    for index in range(num_steps):
        points = torch.tensor([0.0, 1.0]).double()[:, None, None]
        v = velocity(points, 1 - index / num_steps)
        if index in stochastic:
            at_zero, at_one = table.mean(points, v, torch.full((2,), index)).flatten()
            added = table.std_K[index] ** 2
        else:
            at_zero, at_one = (points - v / num_steps).flatten()
            added = 0.0
        slope = at_one - at_zero
        mean, variance = at_zero + slope * mean, slope**2 * variance + added
    return mean.item(), math.sqrt(variance.item())


def error_of(table, stochastic):
    """Distance of mean and standard deviation from the data's, which the exact ODE ends in."""
    mean, std = moments_after(table, stochastic)
    return abs(mean - MEAN), abs(std - SPREAD)


@pytest.mark.parametrize("noise_level", [0.3, 0.7])
def test_the_sde_has_the_marginals_of_the_ode(noise_level):
    """The error falls with the steps as that of the ODE's own Euler steps does, which it never exceeds."""
    tables = [transition_table("flow_sde", num_steps, noise_level) for num_steps in (5, 10, 20, 40, 80, 160)]
    errors = [error_of(table, range(table.num_steps)) for table in tables]
    assert all(mean_error < 1e-6 for mean_error, _ in errors)
    std_errors = [std_error for _, std_error in errors]
    assert all(later < 0.65 * earlier for earlier, later in itertools.pairwise(std_errors))
    assert std_errors[-1] < 0.01 * SPREAD
    assert all(error < error_of(table, ())[1] for table, error in zip(tables, std_errors, strict=True))


@pytest.mark.parametrize("noise_level", [0.3, 0.7])
@pytest.mark.parametrize("mutation", [0.0, 2.0])
def test_without_its_pull_or_with_twice_as_much_the_marginals_are_wrong(noise_level, mutation):
    table = transition_table("flow_sde", 160, noise_level)
    wrong = TransitionTable(mutation * table.pull_K, table.std_K)
    assert error_of(wrong, range(160))[1] > 10 * error_of(table, range(160))[1]
    assert error_of(wrong, range(160))[1] > 0.15 * SPREAD


@pytest.mark.parametrize("num_steps", [4, 10])
def test_one_stochastic_step_of_few_is_as_near_as_the_ode(num_steps):
    table = transition_table("flow_sde", num_steps, 0.5)
    for index in table.stochastic_steps:
        mean_error, std_error = error_of(table, (index,))
        assert mean_error < 1e-6
        assert std_error < error_of(table, ())[1] + 0.05 * SPREAD


@pytest.mark.parametrize("num_steps", [2, 5, 10])
@pytest.mark.parametrize("noise_level", [0.3, 1.0])
def test_preserved_coefficients_are_exact_for_a_point_of_data(num_steps, noise_level):
    """Where the data are one point, predicted noise and action are exact: any number of steps ends in that point with
    the noise that the ODE leaves at every time."""
    table = transition_table("flow_cps", num_steps, noise_level)
    left = 1.0
    for index in table.stochastic_steps:
        after = 1 - (index + 1) / num_steps
        ratio = (after - table.pull_K[index].item()) / (1 - index / num_steps)
        left = math.sqrt((ratio * left) ** 2 + table.std_K[index].item() ** 2)
        assert left == pytest.approx(after, rel=1e-5)
    sde = transition_table("flow_sde", num_steps, 0.3)
    ratio = 1 - 1 / num_steps - sde.pull_K[0].item()
    assert math.hypot(ratio, sde.std_K[0].item()) != pytest.approx(1 - 1 / num_steps, rel=1e-3)


def test_sampled_chains_have_the_moments_that_were_computed():
    num_steps, num_samples = 8, 40000
    plan = ChainPlan(ChainSettings(noise_level=0.6, stochastic_steps="all"), sizes_of(num_steps))
    noise = draw_chain_noise(plan, num_samples, torch.Generator().manual_seed(0))
    chain = run_chain(AnalyticFlow(num_steps), plan, noise)
    mean, std = moments_after(plan.table, range(num_steps))
    assert chain.actions_BTA.mean().item() == pytest.approx(mean, abs=4 * std / math.sqrt(num_samples))
    assert chain.actions_BTA.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * num_samples))


def test_the_table_is_that_of_rlinf():
    """``sample_mean_var_val`` of RLinf 0.3.0, written out: weights of predicted action and predicted noise."""
    num_steps, level = 5, 0.5
    times = torch.linspace(1, 1 / num_steps, num_steps)
    times = torch.cat([times, torch.zeros(1)])
    stand_in = torch.where(times == 1, times[1], times)
    sigma = (level * torch.sqrt(times / (1 - stand_in)))[:-1]
    delta = times[:-1] - times[1:]
    x, v = torch.randn(5, 2, 3), torch.randn(5, 2, 3)
    at = [weights[:, None, None] for weights in (times[:-1], delta, sigma)]
    time, step, noise = at
    mean = (x - v * time) * (1 - (time - step)) + (x + v * (1 - time)) * (time - step - noise**2 * step / (2 * time))
    table = transition_table("flow_sde", num_steps, level)
    torch.testing.assert_close(table.mean(x, v, torch.arange(5)), mean)
    torch.testing.assert_close(table.std(torch.arange(5)), (torch.sqrt(step) * noise).flatten())


def test_a_chain_with_noise_in_one_step_follows_the_ode_elsewhere():
    num_steps = 6
    plan = ChainPlan(ChainSettings(), sizes_of(num_steps))
    noise = draw_chain_noise(plan, 64, torch.Generator().manual_seed(1))
    assert noise.step_BF.unique().tolist() == list(range(num_steps))
    chain = run_chain(AnalyticFlow(num_steps), plan, noise)
    flow = AnalyticFlow(num_steps)
    for row in range(64):
        x, at = noise.initial_BTA[row : row + 1], noise.step_BF[row, 0]
        for index in range(num_steps):
            if index == at:
                torch.testing.assert_close(chain.before_BFTA[row], x)
                x = chain.after_BFTD[row]
            else:
                v, _ = flow.step(x, torch.tensor([index]))
                x = x - v / num_steps
        torch.testing.assert_close(chain.actions_BTA[row : row + 1], x)
    ends, _ = run_ode(flow, plan.sizes, noise.initial_BTA)
    assert not torch.allclose(ends, chain.actions_BTA, atol=1e-2)


def test_only_chosen_steps_are_stochastic():
    plan = ChainPlan(ChainSettings(candidate_steps=(3, 1)), sizes_of(5))
    assert draw_chain_noise(plan, 50, None).step_BF.unique().tolist() == [1, 3]
    plan = ChainPlan(ChainSettings("flow_cps", stochastic_steps="all"), sizes_of(5))
    assert draw_chain_noise(plan, 2, None).step_BF.tolist() == [[0, 1, 2, 3]] * 2


def test_padded_dimensions_get_no_noise():
    sizes = sizes_of(4, padded_dims=3, action_dims=2)
    plan = ChainPlan(ChainSettings(stochastic_steps="all"), sizes)
    first = draw_chain_noise(plan, 5, None)
    second = dataclasses.replace(first, drawn_BFTD=torch.randn_like(first.drawn_BFTD))
    chains = [run_chain(AnalyticFlow(4), plan, noise) for noise in (first, second)]
    apart = (chains[0].actions_BTA - chains[1].actions_BTA).abs()
    assert torch.equal(apart[..., 2], torch.zeros(5, 1))
    assert (apart[..., :2] > 1e-4).all()


def test_a_sample_with_its_own_stream_does_not_depend_on_its_company():
    plan = ChainPlan(ChainSettings(), sizes_of(5))

    def drawn(seeds):
        return draw_chain_noise(plan, len(seeds), [torch.Generator().manual_seed(seed) for seed in seeds])

    alone, together = drawn([7]), drawn([3, 7, 9])
    assert torch.equal(alone.initial_BTA[0], together.initial_BTA[1])
    assert torch.equal(alone.step_BF[0], together.step_BF[1])
    assert torch.equal(alone.drawn_BFTD[0], together.drawn_BFTD[1])
    with pytest.raises(ValueError, match="3 samples needs its own stream; got 1"):
        draw_chain_noise(plan, 3, [torch.Generator()])


def test_density_and_entropy_are_those_of_the_normal_distribution():
    mean, std = torch.randn(3, 4), torch.rand(3, 4) + 0.1
    normal = torch.distributions.Normal(mean, std)
    value = normal.sample()
    torch.testing.assert_close(gaussian_log_prob(value, mean, std), normal.log_prob(value))
    torch.testing.assert_close(gaussian_entropy(std), normal.entropy())


def test_the_log_probability_of_a_chain_is_the_sum_over_its_steps():
    sizes = sizes_of(4, num_predicted=3, num_executed=2, padded_dims=3, action_dims=2)
    plan = ChainPlan(ChainSettings(stochastic_steps="all"), sizes)
    chain = run_chain(AnalyticFlow(4), plan, draw_chain_noise(plan, 5, None))
    std = plan.table.std_K[None, :, None, None]
    wanted = torch.distributions.Normal(chain.mean_BFTA[..., :2], std).log_prob(chain.after_BFTD).sum(dim=1)
    got = plan.log_probs(chain.mean_BFTA, chain.after_BFTD, chain.step_BF)
    torch.testing.assert_close(got, wanted[:, :2])
    whole = ChainPlan(dataclasses.replace(plan.settings, counted_steps="predicted"), sizes)
    torch.testing.assert_close(whole.log_probs(chain.mean_BFTA, chain.after_BFTD, chain.step_BF), wanted)
    entropy = torch.distributions.Normal(0.0, plan.table.std_K).entropy().sum() * 4
    torch.testing.assert_close(plan.entropy(chain.step_BF), entropy.expand(5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("flow_ode", 5, 0.5), "flow_sde, flow_cps; got 'flow_ode'"),
        (("flow_sde", 1, 0.5), "2 denoising steps at least; got 1"),
        (("flow_sde", 5, 0.0), "positive and finite; got 0.0"),
        (("flow_cps", 5, 1.5), r"in \(0, 1\]; got 1.5"),
        (("flow_sde", 4, 2.0), "too much for 4 steps of flow_sde"),
    ],
)
def test_tables_refuse_what_makes_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        transition_table(*arguments)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"stochastic_steps": "some"}, "one, all; got 'some'"),
        ({"counted_steps": "none"}, "executed, predicted; got 'none'"),
        ({"candidate_steps": (5,)}, r"\[0, 1, 2, 3, 4\] of 5; got \(5,\)"),
        ({"candidate_steps": (4,), "transition": "flow_cps"}, r"\[0, 1, 2, 3\] of 5"),
        ({"candidate_steps": ()}, r"got \(\)"),
    ],
)
def test_chains_refuse_choices_that_do_not_fit(choices, message):
    with pytest.raises(ValueError, match=message):
        ChainPlan(ChainSettings(**choices), sizes_of(5))
