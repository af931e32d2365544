# SPDX-License-Identifier: Apache-2.0
"""Started by torchrun: what two ranks compute, written by each rank into ``<folder>/rank<r>.pt``.

usage: run_two_ranks.py <folder> <overrides...>
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from embodix.config.train_schema import NamedChoice
from embodix.testing.host_runs import train_upstream
from embodix.training.features import FeatureSelection, install_features
from embodix_pi05.testing import random_batch, small_pi05

VALID_STEPS = ((6, 2), (1, 3))  # valid action steps of each sample, by rank
PROMPTS = ((5, 9), (3, 12))


def masked_batch(policy: Any, rank: int) -> dict[str, torch.Tensor]:
    """A rank's two samples, with their own number of valid action steps; padding repeats the last, as in datasets."""
    batch = random_batch(policy, PROMPTS[rank], seed=rank)
    for sample, num_valid in enumerate(VALID_STEPS[rank]):
        batch["action"][sample, num_valid:] = batch["action"][sample, num_valid - 1]
        batch["action_is_pad"][sample, num_valid:] = True
    return batch


def masked_step(rank: int) -> dict[str, Any]:
    """Loss, gradients and the numbers of a step of ``action_pad=mask`` under DDP."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    policy = small_pi05()
    choice = NamedChoice("padding_free"), NamedChoice("auto")
    install_features(policy, FeatureSelection(*choice, vision_tokens="valid", action_pad="mask"), accelerator)
    batch = masked_batch(policy, rank)
    wrapped = accelerator.prepare(policy)
    torch.manual_seed(100 + rank)
    loss, _ = wrapped(batch)
    accelerator.backward(loss)
    return {"loss": loss.item(), "gradients": {name: p.grad for name, p in policy.named_parameters()}}


def main(folder: Path, overrides: list[str]) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    masked = masked_step(rank)  # first: upstream's train() takes the process group down when it ends
    torch.save({"masked": masked, "upstream": train_upstream(overrides)}, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
