# SPDX-License-Identifier: Apache-2.0
"""A flow-matching policy of LeRobot as a policy for reinforcement learning.

Shape suffixes: B observations, F stochastic steps of each, T action steps, A padded action dimensions, D action
dimensions that exist, W a width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from embodix.contracts import FlowHost, ObservedFlow
from embodix.policies.flow_host import Batch
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
from embodix_rl.flow.value_head import ValueHead, ValueSettings

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
class Evaluation:
    """Recomputed chunks, differentiable.

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

    Args:
        policy: the LeRobot policy.
        host: the same policy on the packed path.
        chain: where noise is drawn.
        value: the value head; None for none, as GRPO needs none.
    """

    def __init__(
        self, policy: nn.Module, host: FlowHost, chain: ChainSettings, value: ValueSettings | None = None
    ) -> None:
        super().__init__()
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

    def evaluate(self, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        """Log-probabilities, entropy and values of chunks that were sampled before, by this policy as it is now.

        Args:
            forward_inputs: those of a rollout, its samples in any selection and order.
        """
        inputs = {key: value.to(self.host.device) for key, value in forward_inputs.items()}
        before_BFTA, step_BF = inputs.pop(BEFORE_KEY), inputs.pop(STEP_KEY)
        after_BFTD = inputs.pop(AFTER_KEY)
        steps = self.host.recompute(self.host.unpack_observation(inputs), before_BFTA, step_BF)
        mean_RTA = self.plan.table.mean(
            before_BFTA.flatten(0, 1), steps.velocity_BFTA.flatten(0, 1).float(), step_BF.flatten()
        )
        log_probs = self.plan.log_probs(mean_RTA.view_as(before_BFTA), after_BFTD, step_BF)
        values = self._values(steps.prefix_features_BW, steps.action_features_BFW.mean(dim=1))
        return Evaluation(log_probs, self.plan.entropy(step_BF), values)

    def forward(self, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        """`evaluate`: what wrappers such as DDP and FSDP see as the training forward."""
        return self.evaluate(forward_inputs)

    def parameter_groups(self, learning_rate: float, value_learning_rate: float) -> list[dict[str, Any]]:
        """Groups for an optimizer: the policy's trainable parameters and those of the value head, if there is one."""
        trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        groups: list[dict[str, Any]] = [{"name": "policy", "params": trained, "lr": learning_rate}]
        if self.value_head is not None:
            head: Sequence[nn.Parameter] = list(self.value_head.parameters())
            groups.append({"name": "value_head", "params": head, "lr": value_learning_rate})
        return groups

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
