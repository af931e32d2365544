# SPDX-License-Identifier: Apache-2.0
"""One gloo rank, of ``torch.distributed.run``: trains small policies under DeepSpeed's ZeRO.

``zero_rank.py FOLDER LABEL...``: a label is ``<policy>-<strategy>-<way>``, a way one of ``WAYS``; rank 0 writes what
each came to as ``FOLDER/<label>.pt``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_cases import (
    CASES,
    LEARNING_RATE,
    MAX_NORM,
    NUM_STEPS,
    Case,
    as_plain,
    layout_of,
    mean_loss,
    optimizer_of,
    packed_policy,
    rank_batch,
    train_placed,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from embodix.parallel.mesh import FullyShardedStrategy
from embodix.policies.support import support_of
from embodix_deepspeed import unread
from embodix_deepspeed.strategies import Zero1Strategy, Zero2Strategy, Zero3Strategy

STRATEGIES = {s.name: s for s in (FullyShardedStrategy, Zero1Strategy, Zero2Strategy, Zero3Strategy)}
MICRO_BATCHES = 2
STEPS_BEFORE = 2


def place(name: str, policy: Any, optimizer: Any) -> Any:
    strategy = STRATEGIES[name]()
    support = support_of(policy.config.type)
    return strategy.place(policy, optimizer, torch.device("cpu"), layout_of(strategy), support)


def plain(case: Case, name: str) -> Mapping[str, Any]:
    return as_plain(train_placed(case, lambda policy, optimizer, _: place(name, policy, optimizer)))


def recomputed(case: Case, name: str) -> Mapping[str, Any]:
    """Activations computed again in the backward pass."""

    def build() -> Any:
        policy = case.build()
        policy.model.gradient_checkpointing_enable()
        return policy

    return plain(dataclasses.replace(case, build=build), name)


def untold(case: Case, name: str) -> Mapping[str, Any]:
    """Wrong: a gradient of zeros is taken for none."""
    marker = unread.ReadParameters._marker
    unread.ReadParameters._marker = lambda self, name: lambda *found: marker(self, name)() if found else None
    try:
        return plain(case, name)
    finally:
        unread.ReadParameters._marker = marker


def decayed(case: Case, name: str) -> Mapping[str, Any]:
    """Wrong: what has no gradient is stepped as if it were zeros."""
    choose = unread.KeptRanges.choose
    unread.KeptRanges.choose = lambda self, zero, parameters: None
    try:
        return plain(case, name)
    finally:
        unread.KeptRanges.choose = choose


def step_on(placement: Any, case: Case, step: int, num_parts: int = 1) -> float:
    """One step over micro-batches, whose gradients are exchanged with the last."""
    bare = placement.policy.module if hasattr(placement.policy, "module") else placement.policy
    losses = []
    for part in range(num_parts):
        alone = part < num_parts - 1
        with placement.no_sync() if alone else nullcontext():
            batch = rank_batch(case, bare, step, num_parts * dist.get_rank() + part)
            loss = placement.policy.forward(batch)[0] / num_parts
            placement.backward(loss)
        losses.append(mean_loss(loss))
    placement.clip_grad_norm(MAX_NORM)
    placement.optimizer.step()
    placement.optimizer.zero_grad()
    return sum(losses)


def adding_up(case: Case, name: str) -> Mapping[str, Any]:
    """Several micro-batches a step."""
    policy = packed_policy(case)
    placement = place(name, policy, optimizer_of(policy))
    return {"losses": [step_on(placement, case, step, MICRO_BATCHES) for step in range(NUM_STEPS)]}


def dropping(case: Case, name: str) -> Mapping[str, Any]:
    """Wrong: the gradients of all but the last micro-batch are lost."""
    policy = packed_policy(case)
    placement = place(name, policy, optimizer_of(policy))
    backward = placement.backward
    losses = []
    for step in range(NUM_STEPS):
        calls: list[int] = []

        def last_only(loss: Any, calls: list[int] = calls) -> None:
            calls.append(1)
            backward(loss if len(calls) == MICRO_BATCHES else loss * 0)

        placement.backward = last_only
        losses.append(step_on(placement, case, step, MICRO_BATCHES))
    return {"losses": losses}


def going_on(target: str) -> Callable[[Case, str], Mapping[str, Any]]:
    """The state of one strategy taken over by another after some steps."""

    def train(case: Case, name: str) -> Mapping[str, Any]:
        policy = packed_policy(case)
        first = place(name, policy, optimizer_of(policy))
        losses = [step_on(first, case, step) for step in range(STEPS_BEFORE)]
        state = first.state()
        model = {key: whole(value) for key, value in state["model"].items()}
        first.release()
        again = packed_policy(case)
        again.load_state_dict(model)
        second = place(target, again, optimizer_of(again))
        second.load_optimizer({key: like_template(second, key, value) for key, value in state["optimizer"].items()})
        losses += [step_on(second, case, step) for step in range(STEPS_BEFORE, NUM_STEPS)]
        cut = [value for value in state["optimizer"].values() if isinstance(value, DTensor)]
        held = sum(value.to_local().numel() for value in cut) / sum(value.numel() for value in cut)
        return {"losses": losses, "held": held}

    return train


def forgetting(case: Case, name: str) -> Mapping[str, Any]:
    """Wrong: goes on with the weights and without the optimizer's state."""
    policy = packed_policy(case)
    first = place(name, policy, optimizer_of(policy))
    losses = [step_on(first, case, step) for step in range(STEPS_BEFORE)]
    first.load_optimizer({})
    return {"losses": losses + [step_on(first, case, step) for step in range(STEPS_BEFORE, NUM_STEPS)]}


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def like_template(placement: Any, key: str, value: Any) -> Any:
    """A tensor of state as a checkpoint is read for a placement."""
    template = placement.optimizer_template(key.partition("::")[0], value.shape, value.dtype)
    if not isinstance(template, DTensor):
        return whole(value)
    return distribute_tensor(whole(value), template.device_mesh, template.placements)


def scheduled(case: Case, name: str) -> Mapping[str, Any]:
    """A learning rate of zero, set by a schedule on upstream's optimizer, and a hook that is called before the step."""
    policy = packed_policy(case)
    optimizer = optimizer_of(policy)
    placement = place(name, policy, optimizer)
    before = {key: whole(value) for key, value in placement.state()["model"].items()}
    called: list[bool] = []
    placement.optimizer.register_step_pre_hook(lambda *_: called.append(not optimizer.state))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    step_on(placement, case, 0)
    after = {key: whole(value) for key, value in placement.state()["model"].items()}
    same = all(torch.equal(before[key], after[key]) for key in before)
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    step_on(placement, case, 1)
    moved = {key: whole(value) for key, value in placement.state()["model"].items()}
    return {
        "called": called,
        "same": same,
        "moved": any(not torch.equal(before[key], moved[key]) for key in before),
        "lr": placement.optimizer.param_groups[0]["lr"],
    }


WAYS = {
    "plain": plain,
    "recomputed": recomputed,
    "untold": untold,
    "decayed": decayed,
    "adding_up": adding_up,
    "dropping": dropping,
    "to_zero3": going_on("zero3"),
    "to_fsdp2": going_on("fsdp2"),
    "forgetting": forgetting,
    "scheduled": scheduled,
}


def main(folder: Path, labels: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for label in labels:
        policy, name, way = label.split("-")
        done = WAYS[way](CASES[policy], name)
        if dist.get_rank() == 0:
            torch.save(dict(done), folder / f"{label}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
