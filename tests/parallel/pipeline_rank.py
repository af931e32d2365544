# SPDX-License-Identifier: Apache-2.0
"""One gloo rank, of ``torch.distributed.run``: ``pipeline_rank.py FOLDER LABEL...`` trains through pipelines, saves and
loads a sharded checkpoint of the last, and sends through one what is refused.

Rank 0 writes what each came to as ``FOLDER/<label>.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline_cases import fixed_shapes, installed, step_batches, train_pipeline, union
from torch import Tensor

from embodix.packing.sequence_length import ComputedShape
from embodix.parallel.pipeline import PipelinePlacement, PipelineStrategy
from embodix.parallel.sharded_state import begin_saving, load_optimizer_state
from embodix.policies.support import support_of
from embodix_pi05.record import Pi05
from embodix_pi05.stages import Pi05Stages


class LostCondition(Pi05Stages):
    """A wrong one: the gradient of the time condition is not sent back."""

    def compute(self, stage: int, prepared: Any, *received: Tensor) -> tuple[Tensor, ...]:
        if received:
            prefix, suffix, condition = received
            received = prefix, suffix, condition.detach() + 0 * condition
        return super().compute(stage, prepared, *received)


class LosesCondition(Pi05):
    def pipeline_stages(self, policy: Any, num_stages: int) -> Pi05Stages:
        return LostCondition(policy, num_stages)


def main(folder: Path, labels: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trained = {
        "stages_2": lambda: train_pipeline(2),
        "stages_4": lambda: train_pipeline(4),
        "recomputed": lambda: train_pipeline(2, gradient_checkpointing=True),
        "lost_condition": lambda: train_pipeline(2, LosesCondition()),
    }
    for label in labels:
        done, placement = trained[label]()
        write(folder, label, done)
    write(folder, "checkpoint", saved_and_loaded(placement, folder / "checkpoint"))
    write(folder, "refused", refused(2))
    dist.barrier()
    dist.destroy_process_group()


def saved_and_loaded(placement: PipelinePlacement, folder: Path) -> dict[str, Any]:
    """Before and after, of all ranks together."""
    folder.mkdir(exist_ok=True)
    state = placement.state()
    before = {key: value.clone() for key, value in state["optimizer"].items()}
    begin_saving(state, {}, placement.layout.batch_index(dist.get_rank()), folder, dist.new_group()).result()
    placement.optimizer.state.clear()
    placement.load_optimizer(load_optimizer_state(folder, placement.optimizer_template))
    return {"before": union(before), "after": union(placement.state()["optimizer"])}


def refused(size: int) -> str:
    """What micro-batches of two shapes are told."""
    packer = fixed_shapes()
    packer.shapes = (ComputedShape(20, 3, 4), *packer.shapes)
    policy, _ = installed(lambda count: count, packer)
    optimizer = torch.optim.AdamW(policy.parameters())
    strategy = PipelineStrategy(size)
    layout = strategy.layout(dist.get_world_size())
    placement = strategy.place(policy, optimizer, torch.device("cpu"), layout, support_of("pi05"))
    try:
        placement.forward_step(step_batches(policy, 0, 0))
    except ValueError as error:
        return str(error)
    raise AssertionError("micro-batches of two shapes were not refused")


def write(folder: Path, label: str, done: Any) -> None:
    if dist.get_rank() == 0:
        torch.save(done, folder / f"{label}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
