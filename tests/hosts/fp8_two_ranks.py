# SPDX-License-Identifier: Apache-2.0
"""Started by torchrun: two ranks whose clocks disagree on what is faster; each writes ``<folder>/rank<r>.pt``.

usage: fp8_two_ranks.py <folder>
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

from embodix_fp8.precision.block_scaling import BlockRoundedLinear, EmulatedBlocks
from embodix_fp8.precision.gemm_gate import GemmGate
from embodix_fp8.precision.linear_layers import install_kernel
from embodix_pi05.testing import random_batch, small_pi05

PROMPTS = ((5, 9), (3, 12))  # of each rank: other numbers of rows


class OneSided(GemmGate):
    """FP8 is faster for the first rank's narrow products, and for all of the second's."""

    def _time(self, layer: nn.Module, input_MK: torch.Tensor) -> float:
        is_fp8, narrow = isinstance(layer, BlockRoundedLinear), 16 in tuple(layer.weight.shape)  # type: ignore[arg-type]
        return 0.5 if is_fp8 == (narrow or int(os.environ["RANK"]) == 1) else 1.0


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    policy = small_pi05()
    kernel = EmulatedBlocks("for the test")
    installation = install_kernel(policy, "pi05", kernel, OneSided(accelerator.device, kernel.name))
    wrapped = accelerator.prepare(policy)
    torch.manual_seed(rank)
    loss, _ = wrapped(random_batch(policy, PROMPTS[rank], seed=rank))
    accelerator.backward(loss)
    gradients = {name: p.grad for name, p in policy.named_parameters()}
    torch.save({"described": installation.describe(), "gradients": gradients}, folder / f"rank{rank}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
