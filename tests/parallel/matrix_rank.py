# SPDX-License-Identifier: Apache-2.0
"""One of two gloo ranks: ``matrix_rank.py FOLDER NAME...`` saves a training under each strategy and goes on under each.

A step is four micro-batches of one shape, whichever rank computes which; noise and time are drawn by the number of the
micro-batch. Rank 0 writes ``FOLDER/matrix.pt``: what an uninterrupted training came to in its last step, and what each
pair of strategies, one that saves and one that goes on, came to in the same step; and ``forgotten``, what comes of a
pair that leaves the optimizer's state behind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from parallel_cases import MAX_NORM, optimizer_of
from pipeline_cases import PROMPTS, installed, step_batches
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from embodix import plugins
from embodix.data.preprocessing import MicroBatches
from embodix.parallel.optimizer_state import set_named_optimizer_state, state_like_parameters
from embodix.parallel.sharded_state import begin_saving, export_model, load_optimizer_state
from embodix.policies.support import support_of
from embodix.training.sharded_resume import placed_state
from embodix.training.step_forward import StepCount, StepForward
from embodix_pi05 import testing as pi05

CPU = torch.device("cpu")
SAVED_AFTER, LAST = 2, 3


class Training:
    """One policy under a strategy, as upstream's loop runs it."""

    def __init__(self, name: str, weights: Path | None = None) -> None:
        count = StepCount()
        self.policy, installation = installed(count)
        if weights is not None:
            self.policy.load_state_dict(load_file(weights))
        self.optimizer = optimizer_of(self.policy)
        self.accelerator, support = Accelerator(cpu=True), support_of("pi05")
        strategy = plugins.build("parallel_strategies", name, {})
        self.layout = strategy.layout(dist.get_world_size())
        frozen = set(support.unread_parameters(self.policy)) if name == "auto" else set()
        for parameter_name, parameter in self.policy.named_parameters():
            parameter.requires_grad_(parameter_name not in frozen)
        self.placement = strategy.place(self.policy, self.optimizer, CPU, self.layout, support)
        prepared = self.accelerator.prepare(self.policy) if self.placement is None else self.placement.policy
        self.stepped = self.optimizer if self.placement is None else self.placement.optimizer
        backward = self.accelerator.backward if self.placement is None else self.placement.backward
        whole_step = self.placement if hasattr(self.placement, "forward_step") else None
        if self.placement is not None:
            self.accelerator.no_sync = lambda _: self.placement.no_sync()
        timer = pi05.NoTimer()
        StepForward(prepared, self.accelerator, installation, count, lambda phase: None, timer, backward, whole_step)
        self._prepared, self._backward = prepared, backward

    def step(self, number: int) -> tuple[float, float]:
        """Loss and gradient norm of all micro-batches."""
        parts = step_batches(self.policy, number, 0)
        share = len(PROMPTS) // self.layout.num_batches
        first = share * self.layout.batch_index(dist.get_rank())
        own = list(range(first, first + share))
        draw_by_number(self.policy, number, own)
        batches = [parts[index] for index in own]
        loss, _ = self._prepared.forward(MicroBatches(batches) if share > 1 else batches[0])
        self._backward(loss)
        norm = self._clip()
        self.stepped.step()
        self.stepped.zero_grad()
        return float(loss), float(norm)

    def _clip(self) -> Any:
        if self.placement is None:
            return torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_NORM)
        return self.placement.clip_grad_norm(MAX_NORM)

    def state(self) -> Mapping[str, Mapping[str, Any]]:
        return placed_state(self.policy, self.optimizer, self.placement)

    def take_over(self, folder: Path) -> None:
        if self.placement is not None:
            self.placement.load_optimizer(load_optimizer_state(folder, self.placement.optimizer_template))
            return
        state = load_optimizer_state(folder, state_like_parameters(self.policy))
        set_named_optimizer_state(self.policy, self.optimizer, state)


def draw_by_number(policy: Any, step: int, numbers: list[int]) -> None:
    """Noise and time of each micro-batch of a rank, drawn from its number."""
    model, noise, times = policy.model, iter(numbers), iter(numbers)

    def drawn(numbers: Iterator[int], salt: int, draw: Callable[..., torch.Tensor], shape: Any) -> torch.Tensor:
        return draw(shape, generator=torch.Generator().manual_seed(100 * step + 10 * next(numbers) + salt))

    model.sample_noise = lambda shape, device: drawn(noise, 0, torch.randn, shape)
    model.sample_time = lambda size, device: drawn(times, 1, torch.rand, (size,)) * 0.9 + 0.05


def whole_weights(training: Training) -> dict[str, torch.Tensor]:
    """Of all ranks together."""
    own = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in training.state()["model"].items()
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return {name: value for rank in ranks for name, value in rank.items()}


def saved(name: str, folder: Path, group: dist.ProcessGroup) -> dict[str, Any]:
    """Train under a strategy, save on the way, and go on to the last step."""
    training = Training(name)
    losses = [training.step(number) for number in range(SAVED_AFTER)]
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    begin_saving(training.state(), {}, 0, folder, group).result()
    if dist.get_rank() == 0:
        export_model(folder, folder / "model.safetensors")
    dist.barrier()
    last = training.step(LAST)
    return {"first": losses, "last": last, "weights": whole_weights(training)}


def gone_on(name: str, folder: Path, takes_over: bool = True) -> dict[str, Any]:
    training = Training(name, folder / "model.safetensors")
    if takes_over:
        training.take_over(folder)
    return {"last": training.step(LAST), "weights": whole_weights(training)}


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group()
    done: dict[str, Any] = {"uninterrupted": {}, "pairs": {}}
    for name in names:
        done["uninterrupted"][name] = saved(name, folder / name, group)
    for before in names:
        for after in names:
            done["pairs"][before, after] = gone_on(after, folder / before)
    done["forgotten"] = gone_on(names[0], folder / names[0], takes_over=False)
    if dist.get_rank() == 0:
        torch.save(done, folder / "matrix.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
