# SPDX-License-Identifier: Apache-2.0
"""One gloo rank, of ``torch.distributed.run``: trains under strategies on a mesh, in variants and damaged on purpose.

``mesh_rank.py PLANS.json FOLDER``: a plan is ``[label, policy, strategy, options, variant]``; rank 0 writes what each
came to as ``FOLDER/<label>.pt``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from parallel_cases import (
    CASES,
    MAX_NORM,
    NUM_STEPS,
    Case,
    Trained,
    as_plain,
    layout_of,
    mean_loss,
    optimizer_of,
    packed_policy,
    rank_batch,
    train_placed,
    whole_gradients,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embodix import plugins
from embodix.contracts import Placement
from embodix.parallel import tensor_cuts
from embodix.parallel.gradient_norm import clip_grad_norm
from embodix.policies.adapters import bare_policy
from embodix.policies.support import support_of
from embodix_pi05 import testing as pi05

Place = Callable[..., Placement]
DAMAGED_UNIT = "model.paligemma_with_expert.paligemma.model.language_model.layers.0"
NUM_MICRO_BATCHES = 2
NUM_BATCHES_ALONE = 2  # of a step before a run is resumed


def main(plans: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for label, policy, name, options, variant in json.loads(plans.read_text()):
        strategy = plugins.build("parallel_strategies", name, options)

        def place(policy, optimizer, support, strategy=strategy):
            return strategy.place(policy, optimizer, torch.device("cpu"), layout_of(strategy), support)

        done = VARIANTS[variant](CASES[policy], place)
        if dist.get_rank() == 0:
            torch.save(done, folder / f"{label}.pt")
    dist.barrier()
    dist.destroy_process_group()


def plain(case: Case, place: Place) -> dict[str, Any]:
    return dict(as_plain(train_placed(case, place)))


def checkpointed(case: Case, place: Place) -> dict[str, Any]:
    """Activations computed again in the backward pass."""
    return plain(replace(case, build=lambda: pi05.small_pi05(empty_cameras=1, gradient_checkpointing=True)), place)


def micro_batches(case: Case, place: Place) -> dict[str, Any]:
    """Two batches a step, whose gradients are exchanged once."""
    policy = packed_policy(case)
    placement, done = place(policy, optimizer_of(policy), support_of(policy.config.type)), Trained()
    first = placement.layout.batch_index(dist.get_rank()) * NUM_MICRO_BATCHES
    for step in range(NUM_STEPS):
        losses: list[Tensor] = []
        for index in range(NUM_MICRO_BATCHES):
            last = index == NUM_MICRO_BATCHES - 1
            with nullcontext() if last else placement.no_sync():
                loss, _ = placement.policy.forward(rank_batch(case, policy, step, first + index))
                placement.backward(loss / NUM_MICRO_BATCHES)
            losses.append(loss.detach())
        if step == 0:
            done.gradients = dict(whole_gradients(placement))
        done.norms.append(float(placement.clip_grad_norm(MAX_NORM)))
        placement.optimizer.step()
        placement.optimizer.zero_grad()
        done.losses.append(mean_loss(torch.stack(losses).mean()))
    return dict(as_plain(done))


def resumed(case: Case, place: Place) -> dict[str, Any]:
    """Placed after two steps alone, so that the optimizer's state is cut, too; then named, and taken back."""
    policy = packed_policy(case)
    optimizer, done = optimizer_of(policy), Trained()
    for step in range(2):
        _step_alone(case, policy, optimizer, step, done)
    placement = place(policy, optimizer, support_of(policy.config.type))
    assert placement.layout.num_batches == NUM_BATCHES_ALONE
    placement.load_optimizer(placement.state()["optimizer"])
    for step in range(2, NUM_STEPS):
        loss, _ = placement.policy.forward(
            rank_batch(case, policy, step, placement.layout.batch_index(dist.get_rank()))
        )
        placement.backward(loss)
        done.norms.append(float(placement.clip_grad_norm(MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        done.losses.append(mean_loss(loss))
    done.parameters = {name: whole(value) for name, value in placement.state()["model"].items()}
    return dict(as_plain(done))


def _step_alone(case: Case, policy: Any, optimizer: torch.optim.Optimizer, step: int, done: Trained) -> None:
    losses = []
    for index in range(NUM_BATCHES_ALONE):
        loss, _ = policy.forward(rank_batch(case, policy, step, index))
        (loss / NUM_BATCHES_ALONE).backward()
        losses.append(loss.item())
    if step == 0:
        done.gradients = {n: None if p.grad is None else p.grad.clone() for n, p in policy.named_parameters()}
    done.norms.append(float(clip_grad_norm(policy.parameters(), MAX_NORM)))
    optimizer.step()
    optimizer.zero_grad()
    done.losses.append(sum(losses) / NUM_BATCHES_ALONE)


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def watched(case: Case, place: Place) -> dict[str, Any]:
    """One step, with the most units that are gathered at any time."""
    return _watched(case, place, keep=False)


def kept_gathered(case: Case, place: Place) -> dict[str, Any]:
    """Damaged: no unit is given up after its forward pass."""
    return _watched(case, place, keep=True)


def _watched(case: Case, place: Place, keep: bool) -> dict[str, Any]:
    counts: dict[str, int] = {"forward": 0, "backward": 0}

    def place_watched(policy: Any, optimizer: Any, support: Any) -> Placement:
        placement = place(policy, optimizer, support)
        units = [[policy.get_submodule(path) for path in unit.modules] for unit in support.shard_units(policy)]
        for unit in units:
            if keep:
                unit[0].set_reshard_after_forward(False)
            _watch(unit[0], units, counts)
        return placement

    return {**as_plain(train_placed(case, place_watched, num_steps=1)), "gathered": counts}


def _watch(module: nn.Module, units: list[list[nn.Module]], counts: dict[str, int]) -> None:
    def observe(phase: str) -> None:
        counts[phase] = max(counts[phase], sum(_is_gathered(unit) for unit in units))

    def forward_hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        observe("forward")
        if output.requires_grad:
            output.register_hook(lambda gradient: observe("backward"))

    for linear in (part for part in module.modules() if isinstance(part, nn.Linear)):
        linear.register_forward_hook(forward_hook)


def _is_gathered(unit: list[nn.Module]) -> bool:
    return any(not isinstance(parameter, DTensor) for module in unit for parameter in module.parameters())


def unaveraged(case: Case, place: Place) -> dict[str, Any]:
    """Damaged: the gradients of one unit are summed where they should be averaged."""

    def place_damaged(policy: Any, optimizer: Any, support: Any) -> Placement:
        placement = place(policy, optimizer, support)
        unit: Any = bare_policy(policy).get_submodule(DAMAGED_UNIT)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)
        return placement

    return dict(as_plain(train_placed(case, place_damaged, num_steps=2)))


def unshared_keys_values(case: Case, place: Place) -> dict[str, Any]:
    """Damaged: the gradient behind keys and values is that of a rank's own query heads."""
    return _damaged(case, place, mock.patch.object(tensor_cuts, "_summing_gradients", _own_gradient))


def unsummed_norms(case: Case, place: Place) -> dict[str, Any]:
    """Damaged: the weights of norms that all heads share get the gradient of a rank's own heads."""
    return _damaged(case, place, mock.patch.object(tensor_cuts.TensorParts, "sum_gradients", lambda parts: None))


def _own_gradient(module: nn.Module, inputs: Any, output: DTensor) -> Tensor:
    return output.to_local()


def _damaged(case: Case, place: Place, damage: AbstractContextManager[Any]) -> dict[str, Any]:
    with damage:
        return dict(as_plain(train_placed(case, place, num_steps=2)))


VARIANTS: dict[str, Callable[[Case, Place], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        plain,
        checkpointed,
        micro_batches,
        resumed,
        watched,
        kept_gathered,
        unaveraged,
        unshared_keys_values,
        unsummed_norms,
    )
}

if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
