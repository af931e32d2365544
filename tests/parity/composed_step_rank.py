# SPDX-License-Identifier: Apache-2.0
"""Started by torchrun on two ranks: each writes its step's result into ``<folder>/rank<r>.pt``.

usage: composed_step_rank.py <folder>
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from embodix.packing.layout import PaddingFreePacker
from embodix_pi05.testing import run_step

BINS = (((0, 3), (5,)), ((1, 2, 4), (6,)))  # of each rank: uneven in samples, steps and dimensions


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    results = {}
    for action_pad in ("host", "mask"):
        result = run_step(BINS[rank], PaddingFreePacker(), action_pad=action_pad, accelerator=accelerator)
        results[action_pad] = {**vars(result), "token_counts": dataclasses.asdict(result.token_counts)}
    torch.save(results, folder / f"rank{rank}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
