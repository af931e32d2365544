# SPDX-License-Identifier: Apache-2.0
"""Run upstream's GR00T and a fast path on the same batch and noise, and keep what is compared.

The reference is upstream run one sample at a time, because in a padded batch its action head attends to padding.

Shape suffixes: B samples, F flow samples an observation, T action steps, A padded action dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from embodix.policies.settings import FastPathSettings
from embodix_groot.reference import samples_of
from embodix_groot.training import draw_noise_and_time
from embodix_groot.wrapper import GrootN15Wrapper
from embodix_pi05.testing_runs import TrainingRun, finish_run

# Parts of upstream's model that tokens start from.
EMBEDDINGS = ("embed_tokens", "mlp1", "_encoder.", "position_embedding", "future_tokens")


@torch.no_grad()
def strengthen(policy: Any) -> Any:
    """Give every token and every attention an effect: fresh weights are so small that tokens are nearly equal."""
    for name, parameter in policy.named_parameters():
        if parameter.ndim > 1:
            parameter.mul_(10.0 if any(part in name for part in EMBEDDINGS) else 3.0)
    return policy


@contextmanager
def given_noise(head: Any, noise: Tensor, time: Tensor | None = None) -> Iterator[None]:
    """Upstream's head takes this noise, and this time, instead of drawing."""
    with mock.patch.object(torch, "randn", lambda *_, **__: noise):
        if time is None:
            yield
        else:
            with mock.patch.object(head, "sample_time", lambda *_, **__: time):
                yield


def run_reference(policy: Any, batch: Mapping[str, Tensor], seed: int = 0) -> TrainingRun:
    """Forward and backward of upstream, one sample at a time, on the noise that its own batched call would draw."""
    head = policy._groot_model.action_head
    torch.manual_seed(seed)
    noise_BFTA, time_BF = draw_noise_and_time(head, batch["action"], 1)
    total, count = torch.zeros(()), batch["action_mask"].sum()
    for index, sample in enumerate(samples_of(policy, batch)):
        with given_noise(head, noise_BFTA[index], time_BF[index]):
            loss, _ = type(policy).forward(policy, sample)
        total = total + loss * sample["action_mask"].sum()
    return finish_run(policy, total / count)


def run_upstream(policy: Any, batch: Mapping[str, Tensor], seed: int = 0) -> TrainingRun:
    """Forward and backward of upstream's own batched call."""
    torch.manual_seed(seed)
    loss, _ = type(policy).forward(policy, dict(batch))
    return finish_run(policy, loss)


def run_fast(policy: Any, batch: Mapping[str, Tensor], settings: FastPathSettings, seed: int = 0) -> TrainingRun:
    """Forward and backward with the fast path installed."""
    installation = GrootN15Wrapper().install(policy, settings)
    try:
        torch.manual_seed(seed)
        loss, _ = policy(dict(batch))
        return finish_run(policy, loss)
    finally:
        installation.uninstall()


def reference_actions(policy: Any, batch: Mapping[str, Tensor], noise_BTA: Tensor) -> Tensor:
    """``[B, T, A]`` actions of upstream's own sampler, one sample at a time."""
    actions = []
    for index, sample in enumerate(samples_of(policy, batch)):
        with given_noise(policy._groot_model.action_head, noise_BTA[index : index + 1]):
            actions.append(type(policy).predict_action_chunk(policy, sample))
    policy.train()
    return torch.cat(actions)


def fast_actions(
    policy: Any, batch: Mapping[str, Tensor], settings: FastPathSettings, noise_BTA: Tensor | None = None
) -> Tensor:
    """``[B, T, A]`` actions with the fast path installed."""
    installation = GrootN15Wrapper().install(policy, settings)
    try:
        actions: Tensor = policy.predict_action_chunk(dict(batch), noise=noise_BTA)
    finally:
        installation.uninstall()
        policy.train()
    return actions
