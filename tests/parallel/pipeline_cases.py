# SPDX-License-Identifier: Apache-2.0
"""Five steps of four micro-batches each of a small policy, through a pipeline and in one process.

Micro-batches differ in samples, prompts and padded action steps, and have one shape. Noise and time are drawn by the
number of the step and of the copy, so that one process that goes through all copies draws the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from parallel_cases import MAX_NORM, NUM_STEPS, Trained, as_plain, optimizer_of
from torch import Tensor

from embodix.attention.cpu import SegmentAuto
from embodix.contracts import PolicySupport
from embodix.data.preprocessing import MicroBatches
from embodix.packing.sequence_length import ComputedShape, SequenceLengthPacker
from embodix.parallel.gradient_norm import clip_grad_norm
from embodix.parallel.pipeline import PipelinePlacement, PipelineStrategy
from embodix.policies.settings import FastPathSettings
from embodix.policies.support import support_of
from embodix.training.step_forward import StepCount, StepForward
from embodix_pi05 import testing as pi05
from embodix_pi05.wrapper import Pi05Wrapper

DEPTH = 4
PROMPTS = ((3, 8), (5, 1, 4), (12,), (2, 7))
SHAPE = ComputedShape(rows=40, samples=3, images=6)


def fixed_shapes() -> SequenceLengthPacker:
    packer = SequenceLengthPacker(num_shapes=1, bins_per_step=len(PROMPTS))
    packer.shapes = (SHAPE,)
    return packer


def installed(
    count: Callable[[Tensor], Tensor], packer: SequenceLengthPacker | None = None, **config: Any
) -> tuple[Any, Any]:
    """A policy of four layers with its packed computation, and the installation."""
    architecture = {
        part: {**sizes, "depth": DEPTH} if "depth" in sizes else sizes
        for part, sizes in pi05.SMALL_ARCHITECTURE.items()
    }
    policy = pi05.small_pi05(architecture, empty_cameras=1, **config)
    settings = FastPathSettings(
        packer or fixed_shapes(), SegmentAuto(), action_pad="mask", reduce_count=count, uneven_batches=True
    )
    return policy, Pi05Wrapper().install(policy, settings)


def step_batches(policy: Any, step: int, index: int) -> list[dict[str, Tensor]]:
    """The micro-batches of a step of the ``index``-th copy; seeds what the policy then draws."""
    parts = []
    for number, prompts in enumerate(PROMPTS):
        part = pi05.random_batch(policy, prompts, seed=1000 * step + 10 * index + number)
        part["action_is_pad"][0, 5 - number - index :] = True
        parts.append(part)
    torch.manual_seed(7000 + 10 * step + index)
    return parts


def train_alone(num_batches: int) -> Trained:
    """The reference: one process goes through the micro-batches of all copies."""
    mean_count = torch.zeros(())
    policy, installation = installed(lambda count: mean_count)
    optimizer, done = optimizer_of(policy), Trained()
    for step in range(NUM_STEPS):
        copies = [step_batches(policy, step, index) for index in range(num_batches)]
        counts = [installation.action_elements(part) for parts in copies for part in parts]
        mean_count.fill_(sum(counts) / num_batches)
        total = 0.0
        for index in range(num_batches):
            for part in step_batches(policy, step, index):
                loss, _ = policy.forward(part)
                (loss / num_batches).backward()
                total += loss.item() / num_batches
        if step == 0:
            done.gradients = {
                name: None if p.grad is None else p.grad.detach().clone() for name, p in policy.named_parameters()
            }
        done.norms.append(float(clip_grad_norm(policy.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        done.losses.append(total)
    done.parameters = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    return done


def train_pipeline(
    size: int, support: PolicySupport | None = None, **config: Any
) -> tuple[dict[str, Any], PipelinePlacement]:
    """The same through a pipeline, as upstream's loop runs it; on every rank, which have what all together have."""
    count = StepCount()
    policy, installation = installed(count, **config)
    strategy, optimizer = PipelineStrategy(size), optimizer_of(policy)
    layout = strategy.layout(dist.get_world_size())
    device = torch.device("cpu")
    placement = strategy.place(policy, optimizer, device, layout, support or support_of("pi05"))
    accelerator = Accelerator(cpu=True)
    forward = StepForward(
        policy, accelerator, installation, count, lambda phase: None, pi05.NoTimer(), whole_step=placement
    )
    done, index = Trained(), layout.batch_index(dist.get_rank())
    for step in range(NUM_STEPS):
        placement.policy.train()
        loss, _ = placement.policy.forward(MicroBatches(step_batches(policy, step, index)))
        placement.backward(loss)
        if step == 0:
            done.gradients = union({name: p.grad for name, p in policy.named_parameters()})
        done.norms.append(float(placement.clip_grad_norm(MAX_NORM)))
        placement.optimizer.step()
        placement.optimizer.zero_grad()
        done.losses.append(float(loss))
    forward.release()
    done.parameters = union(dict(policy.named_parameters()))
    placed = placement.placed_bytes()
    own = {"held": placed.sharded + placed.replicated, "optimizer": placed.optimizer, "total": placed.total}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return {**as_plain(done), "ranks": ranks, "strategy": placement.strategy}, placement


def union(own: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """What all ranks have by name; copies have the same to the bit."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, {name: None if t is None else t.detach().clone() for name, t in own.items()})
    together: dict[str, Tensor | None] = {}
    for rank in ranks:
        for name, tensor in rank.items():
            before = together.setdefault(name, tensor)
            assert (before is None) == (tensor is None) and (tensor is None or torch.equal(before, tensor)), name
    return together
