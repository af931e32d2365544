# SPDX-License-Identifier: Apache-2.0
"""A flow-matching policy of LeRobot as a policy for reinforcement learning, with its value head.

Shape suffixes: B observations, F stochastic steps of each, T action steps, A padded action dimensions, D action
dimensions that exist, W a width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from embodix.contracts import FlowHost, ObservedFlow
from embodix.policies.flow_host import Batch
from embodix.policies.settings import FastPathSettings
from embodix.policies.support import require_offered
from embodix_rl.flow.chain import (
    Chain,
    ChainNoise,
    ChainPlan,
    ChainSettings,
    Generators,
    draw_chain_noise,
    run_chain,
    run_ode,
)


@dataclass(frozen=True)
class ValueSettings:
    """What the value head reads and how it is built.

    Attributes:
        features: ``prefix`` reads the observation alone, the mean over its tokens; ``action`` reads the action tokens
            in the stochastic step, so that the value depends on the noise there too (π-RL, arXiv 2510.25889, takes
            either, by the policy).
        detached: the value loss does not train the policy.
        hidden_sizes: widths of the hidden layers.
    """

    features: Literal["prefix", "action"] = "prefix"
    detached: bool = True
    hidden_sizes: tuple[int, ...] = (256, 128)

    def __post_init__(self) -> None:
        if self.features not in ("prefix", "action"):
            raise ValueError(f"features of the value head are prefix or action; got {self.features!r}.")
        if any(size < 1 for size in self.hidden_sizes):
            raise ValueError(f"hidden_sizes are widths, 1 at least; got {self.hidden_sizes}.")


class ValueHead(nn.Module):
    """Normed features through a small network in fp32; 0 for every observation before it is trained."""

    def __init__(self, width: int, settings: ValueSettings) -> None:
        super().__init__()
        self.settings = settings
        widths = (width, *settings.hidden_sizes)
        layers: list[nn.Module] = [nn.LayerNorm(width)]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.GELU()]
        last = nn.Linear(widths[-1], 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(*layers, last)

    def forward(self, features_BW: Tensor) -> Tensor:
        """``[B]`` values."""
        features_BW = features_BW.detach() if self.settings.detached else features_BW
        values_B: Tensor = self.layers(features_BW.float()).squeeze(-1)
        return values_B


BEFORE_KEY, AFTER_KEY, STEP_KEY = "chain.before", "chain.after", "chain.step"


@dataclass(frozen=True)
class Rollout:
    """Sampled action chunks.

    Attributes:
        actions: ``[B, T, D]``, normalised as the host's ``predict_action_chunk`` leaves them.
        log_probs: ``[B, T', D]`` of the action steps that count; None in evaluation, where nothing is drawn.
        values: ``[B]``; None without a value head.
        forward_inputs: everything that `FlowPolicy.evaluate` needs, tensors with the sample first; empty in evaluation.
    """

    actions: Tensor
    log_probs: Tensor | None
    values: Tensor | None
    forward_inputs: dict[str, Tensor]


@dataclass(frozen=True)
class RecomputedChunks:
    """Chunks that were sampled before, differentiable.

    Attributes:
        log_probs: ``[B, T', D]``, as in the rollout.
        entropy: ``[B]`` of the draws that count. With a fixed noise level it depends on nothing that is trained.
        values: ``[B]``; None without a value head.
    """

    log_probs: Tensor
    entropy: Tensor
    values: Tensor | None


class FlowPolicy(nn.Module):
    """Samples a LeRobot policy with log-probabilities and recomputes them with gradients.

    ``policy`` is the host's module and keeps its parameter names; ``value_head`` stands beside it. Dropout is off in
    both methods: a log-probability under another dropout mask is that of another policy.

    Sampling can compute with quantized weights; they have no gradient, so `evaluate` computes with those that they are
    made from. These are also what `state_dict` gives and `load_state_dict` changes; sampling quantizes them again.

    Args:
        policy: the LeRobot policy.
        host: the same policy on the packed path.
        chain: where noise is drawn.
        value: the value head; None for none, as GRPO needs none.
        quantizer: of the weights that sampling computes with (hook ``register_quantizers``); None for the policy's own.
    """

    def __init__(
        self,
        policy: nn.Module,
        host: FlowHost,
        chain: ChainSettings,
        value: ValueSettings | None = None,
        quantizer: Any = None,
    ) -> None:
        super().__init__()
        self._quantizer, self._quantized, self._sampling_is_old = quantizer, None, False
        self.register_state_dict_pre_hook(self._take_own_weights)
        self.register_load_state_dict_pre_hook(self._take_own_weights)
        self.policy = policy
        self.host = host
        self.plan = ChainPlan(chain, host.sizes)
        self.value_head: ValueHead | None = None
        if value is not None:
            width = host.sizes.prefix_width if value.features == "prefix" else host.sizes.action_width
            self.value_head = ValueHead(width, value).to(host.device)

    @torch.no_grad()
    def sample(
        self,
        batch: Batch,
        *,
        mode: Literal["train", "eval"] = "train",
        generator: Generators = None,
        noise: ChainNoise | Tensor | None = None,
    ) -> Rollout:
        """Action chunks for a preprocessed batch of observations.

        Args:
            batch: what the policy's preprocessor returns.
            mode: ``train`` draws noise in the denoising steps; ``eval`` is the host's ``predict_action_chunk``.
            generator: a stream for the batch or one for each sample; None for torch's own.
            noise: what to use instead of drawing: a `ChainNoise` in ``train``, the initial noise ``[B, T, A]`` in
                ``eval``.

        Raises:
            ValueError: an unknown mode, noise of the other mode, or a batch that the policy refuses.
        """
        if mode not in ("train", "eval"):
            raise ValueError(f"mode is train or eval; got {mode!r}.")
        if noise is not None and isinstance(noise, ChainNoise) != (mode == "train"):
            raise ValueError(f"mode={mode} takes {'a ChainNoise' if mode == 'train' else 'the initial noise'}.")
        self._take_sampling_weights()
        flow = self.host.observe(batch)
        if mode == "eval":
            return self._sample_ode(batch, flow, generator, noise)
        chain_noise = noise if isinstance(noise, ChainNoise) else self.draw_noise(batch, generator)
        chain = run_chain(flow, self.plan, chain_noise.to(self.host.device))
        log_probs = self.plan.log_probs(chain.mean_BFTA, chain.after_BFTD, chain.step_BF)
        values = self._values(flow.prefix_features(), chain.action_features_BW)
        return Rollout(self._real(chain.actions_BTA), log_probs, values, self._forward_inputs(batch, chain))

    def draw_noise(self, batch: Batch, generator: Generators = None) -> ChainNoise:
        """The noise of a batch in ``train`` mode, on the CPU."""
        return draw_chain_noise(self.plan, self.host.batch_size(batch), generator)

    def evaluate(self, forward_inputs: Mapping[str, Tensor]) -> RecomputedChunks:
        """Log-probabilities, entropy and values of chunks that were sampled before, by this policy as it is now.

        Args:
            forward_inputs: those of a rollout, its samples in any selection and order.
        """
        self._take_own_weights()
        inputs = {key: value.to(self.host.device) for key, value in forward_inputs.items()}
        before_BFTA, step_BF = inputs.pop(BEFORE_KEY), inputs.pop(STEP_KEY)
        after_BFTD = inputs.pop(AFTER_KEY)
        steps = self.host.recompute(self.host.unpack_observation(inputs), before_BFTA, step_BF)
        mean_RTA = self.plan.table.mean(
            before_BFTA.flatten(0, 1), steps.velocity_BFTA.flatten(0, 1).float(), step_BF.flatten()
        )
        log_probs = self.plan.log_probs(mean_RTA.view_as(before_BFTA), after_BFTD, step_BF)
        values = self._values(steps.prefix_features_BW, steps.action_features_BFW.mean(dim=1))
        return RecomputedChunks(log_probs, self.plan.entropy(step_BF), values)

    def weights_changed(self) -> None:
        """The high-precision weights were written to without `load_state_dict`: those that sampling takes are old."""
        self._sampling_is_old = True

    def _take_sampling_weights(self) -> None:
        """Quantize the weights where sampling is to compute with quantized ones and there are none of these."""
        if self._quantizer is None:
            return
        if self._sampling_is_old:
            self._take_own_weights()
        if self._quantized is None:
            self._quantized = self._quantizer.install(self.policy, self._policy_type())
            self._sampling_is_old = False

    def _take_own_weights(self, *_: Any) -> None:
        """Put the high-precision weights back, which are trained, saved and exchanged."""
        if self._quantized is not None:
            self._quantized.uninstall()
            self._quantized = None

    def _policy_type(self) -> str:
        policy: Any = self.policy
        return str(policy.config.type)

    def _sample_ode(self, batch: Batch, flow: ObservedFlow, generator: Generators, noise: Any) -> Rollout:
        if noise is None and generator is not None:
            noise = self.draw_noise(batch, generator).initial_BTA
        noise = flow.initial_noise() if noise is None else noise.to(self.host.device, flow.noise_dtype)
        actions_BTA, features_BW = run_ode(flow, self.host.sizes, noise)
        values = self._values(flow.prefix_features(), features_BW)
        return Rollout(self._real(actions_BTA), None, values, {})

    def _values(self, prefix_BW: Tensor, action_BW: Tensor) -> Tensor | None:
        if self.value_head is None:
            return None
        features_BW = prefix_BW if self.value_head.settings.features == "prefix" else action_BW
        values_B: Tensor = self.value_head(features_BW)
        return values_B

    def _forward_inputs(self, batch: Batch, chain: Chain) -> dict[str, Tensor]:
        drawn = {BEFORE_KEY: chain.before_BFTA, AFTER_KEY: chain.after_BFTD, STEP_KEY: chain.step_BF}
        return {**self.host.pack_observation(batch), **drawn}

    def _real(self, actions_BTA: Tensor) -> Tensor:
        return actions_BTA[..., : self.host.sizes.action_dims]


def flow_policy(
    policy: Any,
    settings: FastPathSettings,
    chain: ChainSettings,
    value: ValueSettings | None = None,
    quantizer: Any = None,
) -> FlowPolicy:
    """A policy of LeRobot with log-probabilities.

    Args:
        policy: upstream's policy, loaded, on its device; a fast path or a quantization may be installed on it.
        settings: of the packed computation; ``attention=None`` computes upstream's dense attention.
        chain: where noise is drawn, and how much.
        value: the value head; None for none.
        quantizer: of the weights that sampling computes with; None for the policy's own.

    Raises:
        embodix.contracts.NotOfferedError: a policy type without a flow.
        ValueError: settings that don't fit it.
    """
    policy_type = getattr(getattr(policy, "config", None), "type", type(policy).__name__)
    known = "Log-probabilities are known for policies of type"
    support = require_offered(policy_type, "flow", known, "Choose one of these.")
    return FlowPolicy(policy, support.flow(policy, settings), chain, value, quantizer)


def train_only(policy: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze every parameter whose name none of some regular expressions is found in.

    Raises:
        ValueError: nothing would be trained; the message has the names of the modules that could be.
    """
    named = dict(policy.named_parameters())
    chosen = {name for name in named if any(re.search(pattern, name) for pattern in patterns)}
    if not chosen:
        modules = sorted({name.rpartition(".")[0] for name in named})
        raise ValueError(f"trainable={list(patterns)} names no parameter of the policy; its modules: {modules}.")
    for name, parameter in named.items():
        parameter.requires_grad_(name in chosen)
