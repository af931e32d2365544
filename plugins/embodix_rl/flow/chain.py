# SPDX-License-Identifier: Apache-2.0
"""Denoising chains with stochastic steps: their noise, how they are run, and the log-probability of what was drawn.

Noise is drawn in the action dimensions that exist; padded ones follow the ODE, so that nothing is drawn which the
log-probability leaves out.

Shape suffixes: B observations, F stochastic steps of each, T action steps, A padded action dimensions, D action
dimensions that exist, W a width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodix.contracts import ObservedFlow
from embodix.policies.flow_host import FlowSizes
from embodix_rl.flow.transitions import (
    TransitionKind,
    TransitionTable,
    deterministic_step,
    gaussian_entropy,
    gaussian_log_prob,
    transition_table,
)

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
