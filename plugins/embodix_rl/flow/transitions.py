# SPDX-License-Identifier: Apache-2.0
"""One denoising step of a flow-matching policy as a Gaussian transition.

Everything here is in π0.5's direction: ``x_t = t * noise + (1 - t) * action``, the velocity is ``noise - action`` and t
runs from 1 to 0 in K equal steps, ``t_k = 1 - k / K``. The deterministic step is ``x + (t_(k+1) - t_k) v``. A
stochastic one pulls the state towards less noise and draws noise in exchange::

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

Shape suffixes: K denoising steps, B sequences, T action steps, A action dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

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
