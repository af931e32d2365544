# SPDX-License-Identifier: Apache-2.0
"""Five training steps of a small policy under a parallel strategy, and the same in one process.

The batches are one global batch a step, cut among the ranks that have samples of their own; noise and time are drawn
by the number of the rank's batch, so that one process that goes through all batches draws the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from embodix.attention.cpu import SegmentAuto
from embodix.contracts import Placement, PolicySupport, RankLayout, RunTraits
from embodix.packing.layout import PaddingFreePacker
from embodix.parallel.gradient_norm import clip_grad_norm
from embodix.policies.settings import FastPathSettings
from embodix.policies.support import support_of
from embodix_groot import testing as groot
from embodix_groot.wrapper import GrootN15Wrapper
from embodix_pi05 import testing as pi05
from embodix_pi05.wrapper import Pi05Wrapper

SOUND_RUN = RunTraits(
    support=support_of("pi05"),
    packed=True,
    packing="padding_free",
    composes=False,
    precision="none",
    adapters=False,
    mixture=False,
    streaming=False,
    device="cpu",
    batch_size=8,
)
NUM_STEPS = 5
LEARNING_RATE = 1e-3
MAX_NORM = 1.0


@dataclass(frozen=True)
class Case:
    build: Callable[[], Any]
    wrapper: Callable[[], Any]
    batch: Callable[[Any, int], dict[str, Any]]  # policy, seed


CASES = {
    "pi05": Case(
        lambda: pi05.small_pi05(empty_cameras=1),
        Pi05Wrapper,
        lambda policy, seed: pi05.random_batch(policy, [3, 8], seed=seed),
    ),
    "groot": Case(
        lambda: groot.small_groot(tune_llm=True, tune_visual=True),
        GrootN15Wrapper,
        lambda policy, seed: groot.random_batch(policy, [5, 5], [2, 2], seed=seed),
    ),
}


@dataclass
class Trained:
    """What a strategy came to: means over the ranks that have samples of their own."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)  # of the first step, before clipping
    parameters: dict[str, Tensor] = field(default_factory=dict)
    placed: dict[str, int] = field(default_factory=dict)


def packed_policy(case: Case) -> Any:
    """The small policy with its packed computation in place."""
    policy = case.build()
    case.wrapper().install(policy, FastPathSettings(PaddingFreePacker(), SegmentAuto()))
    return policy


def optimizer_of(policy: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.01)


def rank_batch(case: Case, policy: Any, step: int, index: int) -> dict[str, Any]:
    """The batch of the ``index``-th rank that has samples of its own; seeds what the policy then draws."""
    batch = case.batch(policy, 100 * step + index)
    torch.manual_seed(1000 * step + index)
    return batch


def train_alone(case: Case, num_batches: int, num_steps: int = NUM_STEPS) -> Trained:
    """The reference: one process goes through the batches of all ranks and averages their losses."""
    policy = packed_policy(case)
    optimizer, done = optimizer_of(policy), Trained()
    for step in range(num_steps):
        losses = []
        for index in range(num_batches):
            loss, _ = policy.forward(rank_batch(case, policy, step, index))
            (loss / num_batches).backward()
            losses.append(loss.item())
        if step == 0:
            done.gradients = {name: _copy(p.grad) for name, p in policy.named_parameters()}
        done.norms.append(float(clip_grad_norm(policy.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        done.losses.append(sum(losses) / num_batches)
    done.parameters = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    return done


def train_placed(
    case: Case, place: Callable[[Any, Any, PolicySupport], Placement], num_steps: int = NUM_STEPS
) -> Trained:
    """The same under a strategy, on every rank."""
    policy = packed_policy(case)
    placement = place(policy, optimizer_of(policy), support_of(policy.config.type))
    rank = torch.distributed.get_rank()
    layout, done = placement.layout, Trained()
    for step in range(num_steps):
        placement.policy.train()
        loss, _ = placement.policy.forward(rank_batch(case, policy, step, layout.batch_index(rank)))
        placement.backward(loss)
        if step == 0:
            done.gradients = dict(whole_gradients(placement))
        done.norms.append(float(placement.clip_grad_norm(MAX_NORM)))
        placement.optimizer.step()
        placement.optimizer.zero_grad()
        done.losses.append(mean_loss(loss))
    done.parameters = {name: _whole(value) for name, value in placement.state()["model"].items()}
    placed = placement.placed_bytes()
    done.placed = {"held": placed.sharded + placed.replicated, "optimizer": placed.optimizer, "total": placed.total}
    return done


def mean_loss(loss: Tensor) -> float:
    """Over all ranks; those that share samples have the same."""
    value = loss.detach().double().reshape(1)
    torch.distributed.all_reduce(value)
    return float(value) / torch.distributed.get_world_size()


def whole_gradients(placement: Placement) -> Iterator[tuple[str, Tensor | None]]:
    """Gradients by name, gathered."""
    own = getattr(placement, "whole_gradients", None)
    if own is not None:
        yield from own()
        return
    for name, parameter in placement.policy.named_parameters():
        yield name, None if parameter.grad is None else _whole(parameter.grad)


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


def layout_of(strategy: Any) -> RankLayout:
    return strategy.layout(torch.distributed.get_world_size())


def as_plain(done: Trained) -> Mapping[str, Any]:
    return dict(vars(done))
