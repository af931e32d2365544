# SPDX-License-Identifier: Apache-2.0
"""Denoising chains with stochastic steps: their transitions, their noise, how they are run, and the log-probability of
what was drawn.

Noise is drawn in the action dimensions that exist; padded ones follow the ODE, so that nothing is drawn which the
log-probability leaves out.

Everything here is in the direction of `embodix.policies.flow`: ``x_t = t * noise + (1 - t) * action``, the velocity is
``noise - action`` and t runs from 1 to 0 in K equal steps, ``t_k = 1 - k / K``. The deterministic step is
``x + (t_(k+1) - t_k) v``. A stochastic one pulls the state towards less noise and draws noise in exchange::

    mean = x + (t_(k+1) - t_k) v - pull_k (x + (1 - t_k) v),    std = std_k

where ``x + (1 - t) v`` is the predicted noise, ``-t`` times the score of the flow at t. Two choices of pull and std:

``flow_sde``
    The Euler-Maruyama step of the reverse-time SDE that has the ODE's marginals, with
    ``sigma_t = noise_level * sqrt(t / (1 - t))`` (Flow-GRPO, arXiv 2505.05470; π-RL, arXiv 2510.25889, and RLinf's
    ``models/embodiment/openpi/openpi_action_model.py``, ``sample_mean_var_val``). Marginals agree to first order in
    the step; at t = 1, where sigma is infinite, the next step's 1 - t stands in, as in both sources.
``flow_cps``
    Coefficient-preserving sampling (Flow-CPS, arXiv 2509.05952): the share ``sin(pi/2 * noise_level)`` of the noise
    that is left is exchanged for fresh noise, so that its total is exactly that of the ODE whatever the number of
    steps. The last step leaves no noise, so it can't be stochastic.

Shape suffixes: B observations, F stochastic steps of each, K denoising steps, T action steps, A padded action
dimensions, D action dimensions that exist, W a width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from embodix.contracts import ObservedFlow
from embodix.policies.flow_host import FlowSizes

TransitionKind = Literal["flow_sde", "flow_cps"]


@dataclass(frozen=True)
class TransitionTable:
    """Pull and standard deviation of each denoising step, fp32 ``[K]``."""

    pull_K: Tensor
    std_K: Tensor

    @property
    def num_steps(self) -> int:
        return self.std_K.numel()

    @property
    def stochastic_steps(self) -> list[int]:
        """The steps that can draw noise."""
        return self.std_K.nonzero().flatten().tolist()

    def mean(self, x_BTA: Tensor, velocity_BTA: Tensor, step_B: Tensor) -> Tensor:
        """Mean of the state after steps ``step_B``, in fp32."""
        time_B11 = 1.0 - step_B[:, None, None].to(torch.float32) / self.num_steps
        predicted_noise_BTA = x_BTA + (1.0 - time_B11) * velocity_BTA
        ahead_BTA = deterministic_step(x_BTA, velocity_BTA, self.num_steps)
        pull_B11 = self.pull_K.to(step_B.device)[step_B][:, None, None]
        return ahead_BTA - pull_B11 * predicted_noise_BTA

    def std(self, steps: Tensor) -> Tensor:
        """Standard deviation of the state after steps, in their shape and on their device."""
        return self.std_K.to(steps.device)[steps]


def deterministic_step(x_BTA: Tensor, velocity_BTA: Tensor, num_steps: int) -> Tensor:
    """One Euler step of the ODE, in the operations of both hosts' samplers."""
    return x_BTA + (-1.0 / num_steps) * velocity_BTA


def transition_table(kind: TransitionKind, num_steps: int, noise_level: float) -> TransitionTable:
    """The table of one kind; a larger ``noise_level`` explores more.

    Raises:
        ValueError: an unknown kind, a noise level that is not positive (for ``flow_cps``, or is above 1), fewer than
            two steps, or so much noise that a step would turn the sign of the noise that is left.
    """
    if kind not in get_args(TransitionKind):
        raise ValueError(f"transition is one of {', '.join(get_args(TransitionKind))}; got {kind!r}.")
    if num_steps < 2:
        raise ValueError(f"A stochastic flow needs 2 denoising steps at least; got {num_steps}.")
    if not 0.0 < noise_level < math.inf or (kind == "flow_cps" and noise_level > 1.0):
        bound = "in (0, 1]" if kind == "flow_cps" else "positive and finite"
        raise ValueError(f"noise_level of {kind} is {bound}; got {noise_level}.")
    times_K = 1.0 - torch.arange(num_steps, dtype=torch.float64) / num_steps
    table = (_flow_sde if kind == "flow_sde" else _flow_cps)(times_K, 1.0 / num_steps, noise_level)
    left_K = times_K - 1.0 / num_steps - table.pull_K
    if bool((left_K[:-1] < 0).any()):
        raise ValueError(
            f"noise_level={noise_level} is too much for {num_steps} steps of {kind}: a step would overshoot and flip "
            "the noise that is left. Take a lower noise level or more denoising steps."
        )
    return TransitionTable(table.pull_K.float(), table.std_K.float())


def _flow_sde(times_K: Tensor, delta: float, noise_level: float) -> TransitionTable:
    data_share_K = 1.0 - times_K
    data_share_K[0] = data_share_K[1]
    variance_rate_K = noise_level**2 * times_K / data_share_K
    return TransitionTable(variance_rate_K * delta / (2.0 * times_K), (variance_rate_K * delta).sqrt())


def _flow_cps(times_K: Tensor, delta: float, noise_level: float) -> TransitionTable:
    left_K = times_K - delta
    left_K[-1] = 0.0
    angle = noise_level * math.pi / 2.0
    return TransitionTable(left_K * (1.0 - math.cos(angle)), left_K * math.sin(angle))


def gaussian_log_prob(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Elementwise log-density of a normal distribution."""
    return -0.5 * ((value - mean) / std).square() - std.log() - 0.5 * math.log(2.0 * math.pi)


def gaussian_entropy(std: Tensor) -> Tensor:
    """Elementwise differential entropy of a normal distribution, in nats."""
    return std.log() + 0.5 * math.log(2.0 * math.pi * math.e)


Generators = torch.Generator | Sequence[torch.Generator] | None


@dataclass(frozen=True)
class ChainSettings:
    """Which denoising steps draw noise, how much, and what the log-probability counts.

    Attributes:
        transition: ``flow_sde`` or ``flow_cps``, see ``transitions.py``.
        noise_level: how far a stochastic step strays from the ODE.
        stochastic_steps: ``one`` draws noise in one step of each sample, chosen uniformly (the others follow the ODE,
            and training computes one step instead of all: Flow-GRPO-Fast, π-RL's mixed sampling); ``all`` in every
            step that can.
        candidate_steps: the steps that may be stochastic, counted from 0; None for all that can.
        counted_steps: ``executed`` counts the log-probability of the action steps that are executed, as RLinf does;
            ``predicted`` that of the whole chunk. Steps that are not executed still reach the executed ones through
            the attention of later denoising steps: ``predicted`` is the whole density, with more variance.
    """

    transition: TransitionKind = "flow_sde"
    noise_level: float = 0.5
    stochastic_steps: Literal["one", "all"] = "one"
    candidate_steps: tuple[int, ...] | None = None
    counted_steps: Literal["executed", "predicted"] = "executed"

    def __post_init__(self) -> None:
        for name, choices in (("stochastic_steps", ("one", "all")), ("counted_steps", ("executed", "predicted"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is one of {', '.join(choices)}; got {getattr(self, name)!r}.")


class ChainPlan:
    """The settings for one policy's sizes.

    Raises:
        ValueError: settings that don't fit the number of denoising steps.
    """

    def __init__(self, settings: ChainSettings, sizes: FlowSizes) -> None:
        self.settings, self.sizes = settings, sizes
        self.table: TransitionTable = transition_table(settings.transition, sizes.num_denoising, settings.noise_level)
        possible = self.table.stochastic_steps
        chosen = possible if settings.candidate_steps is None else sorted(set(settings.candidate_steps))
        if not chosen or not set(chosen) <= set(possible):
            raise ValueError(
                f"candidate_steps are steps that {settings.transition} can draw noise in, {possible} of "
                f"{sizes.num_denoising}; got {settings.candidate_steps}."
            )
        self.candidates = torch.tensor(chosen)
        executed = settings.counted_steps == "executed"
        self.num_counted = sizes.num_executed if executed else sizes.num_predicted

    @property
    def num_stochastic(self) -> int:
        """F: stochastic steps of a chain."""
        return 1 if self.settings.stochastic_steps == "one" else self.candidates.numel()

    def counted(self, elements: Tensor) -> Tensor:
        """The action steps that count, of ``[B, ..., T, D]``."""
        return elements[..., : self.num_counted, :]

    def log_probs(self, mean_BFTA: Tensor, after_BFTD: Tensor, step_BF: Tensor) -> Tensor:
        """``[B, T', D]`` log-probabilities of what was drawn, summed over the stochastic steps of a chain."""
        mean_BFTD = mean_BFTA[..., : self.sizes.action_dims].float()
        std_BF11 = self.table.std(step_BF)[..., None, None]
        return self.counted(gaussian_log_prob(after_BFTD, mean_BFTD, std_BF11)).sum(dim=1)

    def entropy(self, step_BF: Tensor) -> Tensor:
        """``[B]`` entropy of what counts of the draws; a function of the steps alone, the noise level being fixed."""
        num_elements = self.num_counted * self.sizes.action_dims
        return gaussian_entropy(self.table.std(step_BF)).sum(dim=1) * num_elements


@dataclass(frozen=True)
class ChainNoise:
    """Everything that a chain draws.

    Attributes:
        initial_BTA: where it starts.
        step_BF: int64, its stochastic steps in ascending order.
        drawn_BFTD: standard normal, of each stochastic step.
    """

    initial_BTA: Tensor
    step_BF: Tensor
    drawn_BFTD: Tensor

    def to(self, device: torch.device) -> ChainNoise:
        return ChainNoise(self.initial_BTA.to(device), self.step_BF.to(device), self.drawn_BFTD.to(device))


def draw_chain_noise(plan: ChainPlan, batch_size: int, generators: Generators = None) -> ChainNoise:
    """Noise of a batch on the CPU, so that every device sees the same numbers.

    Args:
        generators: one stream for the batch (None for torch's own), or one for each sample: its noise then does not
            depend on its company.

    Raises:
        ValueError: as many streams as samples are wanted, and there are others.
    """
    if not isinstance(generators, Sequence):
        return _drawn(plan, batch_size, generators)
    if len(generators) != batch_size:
        raise ValueError(f"Each of {batch_size} samples needs its own stream; got {len(generators)}.")
    parts = [_drawn(plan, 1, generator) for generator in generators]
    return ChainNoise(
        *(torch.cat([getattr(part, name) for part in parts]) for name in ("initial_BTA", "step_BF", "drawn_BFTD"))
    )


def _drawn(plan: ChainPlan, batch_size: int, generator: torch.Generator | None) -> ChainNoise:
    sizes, candidates = plan.sizes, plan.candidates
    initial_BTA = torch.randn(batch_size, sizes.num_predicted, sizes.padded_dims, generator=generator)
    if plan.settings.stochastic_steps == "one":
        step_BF = candidates[torch.randint(candidates.numel(), (batch_size, 1), generator=generator)]
    else:
        step_BF = candidates.expand(batch_size, -1)
    shape = (*step_BF.shape, sizes.num_predicted, sizes.action_dims)
    return ChainNoise(initial_BTA, step_BF, torch.randn(shape, generator=generator))


@dataclass(frozen=True)
class Chain:
    """A denoised batch and what recomputing its log-probabilities takes.

    Attributes:
        actions_BTA: the last state.
        before_BFTA: states before the stochastic steps, all dimensions, fp32.
        after_BFTD: states after them, the dimensions that exist, fp32.
        step_BF: the stochastic steps.
        mean_BFTA: means of the draws.
        action_features_BW: features of the action tokens, averaged over the stochastic steps.
    """

    actions_BTA: Tensor
    before_BFTA: Tensor
    after_BFTD: Tensor
    step_BF: Tensor
    mean_BFTA: Tensor
    action_features_BW: Tensor


def run_chain(flow: ObservedFlow, plan: ChainPlan, noise: ChainNoise) -> Chain:
    """Denoise with the noise that is given; the state is kept in fp32."""
    x_BTA, num_dims = noise.initial_BTA.float(), plan.sizes.action_dims
    before_BFTA = x_BTA.new_zeros(*noise.step_BF.shape, *x_BTA.shape[1:])
    mean_BFTA, features_BFW = torch.zeros_like(before_BFTA), None
    after_BFTD = torch.zeros_like(noise.drawn_BFTD)
    for index in range(plan.sizes.num_denoising):
        step_B = torch.full((x_BTA.shape[0],), index, device=x_BTA.device)
        velocity_BTA, features_BW = flow.step(x_BTA, step_B)
        velocity_BTA = velocity_BTA.float()
        ahead_BTA = deterministic_step(x_BTA, velocity_BTA, plan.sizes.num_denoising)
        if features_BFW is None:
            features_BFW = features_BW.new_zeros(*noise.step_BF.shape, features_BW.shape[1])
        rows_R, which_R = (noise.step_BF == index).nonzero(as_tuple=True)
        if rows_R.numel():
            mean_RTA = plan.table.mean(x_BTA, velocity_BTA, step_B)[rows_R]
            drawn_RTD = float(plan.table.std_K[index]) * noise.drawn_BFTD[rows_R, which_R]
            before_BFTA[rows_R, which_R], mean_BFTA[rows_R, which_R] = x_BTA[rows_R], mean_RTA
            features_BFW[rows_R, which_R] = features_BW[rows_R]
            after_BFTD[rows_R, which_R] = mean_RTA[..., :num_dims] + drawn_RTD
            ahead_BTA[rows_R, :, :num_dims] = after_BFTD[rows_R, which_R]
        x_BTA = ahead_BTA
    assert features_BFW is not None
    return Chain(x_BTA, before_BFTA, after_BFTD, noise.step_BF, mean_BFTA, features_BFW.mean(dim=1))


def run_ode(flow: ObservedFlow, sizes: FlowSizes, initial_BTA: Tensor) -> tuple[Tensor, Tensor]:
    """The host's own deterministic sampler: actions ``[B, T, A]``, and features ``[B, W]`` of its first step."""
    x_BTA, first_BW = initial_BTA, None
    for index in range(sizes.num_denoising):
        step_B = torch.full((x_BTA.shape[0],), index, device=x_BTA.device)
        velocity_BTA, features_BW = flow.step(x_BTA, step_B)
        first_BW = features_BW if first_BW is None else first_BW
        x_BTA = deterministic_step(x_BTA, velocity_BTA, sizes.num_denoising)
    assert first_BW is not None
    return x_BTA, first_BW
