# SPDX-License-Identifier: Apache-2.0
"""One gloo rank, of ``torch.distributed.run``: takes a step of each policy under DDP and FSDP2.

``placed_bytes_rank.py FOLDER``: what a rank holds then is ``FOLDER/<policy>-<strategy>-<rank>.json``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_cases import CASES, Case, layout_of, optimizer_of, packed_policy, rank_batch
from torch.nn.parallel import DistributedDataParallel

from embodix import plugins
from embodix.contracts import PlacedBytes
from embodix.parallel.optimizer_state import local_bytes, optimizer_bytes
from embodix.policies.support import support_of


def after_one_step(case: Case, name: str) -> PlacedBytes:
    """What this rank holds of a policy that a strategy has placed, or that DDP copies."""
    policy = packed_policy(case)
    optimizer, strategy = optimizer_of(policy), plugins.build("parallel_strategies", name, {})
    batch = rank_batch(case, policy, 0, dist.get_rank())
    placement = strategy.place(
        policy, optimizer, torch.device("cpu"), layout_of(strategy), support_of(policy.config.type)
    )
    trained: Any = DistributedDataParallel(policy, find_unused_parameters=True) if placement is None else policy
    trained(batch)[0].backward()
    optimizer.step()
    if placement is not None:
        return placement.placed_bytes()
    held = sum(map(local_bytes, policy.parameters()))
    return PlacedBytes(0, held, optimizer_bytes(optimizer), held)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for policy, case in CASES.items():
        for name in ("ddp", "fsdp2"):
            placed = dataclasses.asdict(after_one_step(case, name))
            (folder / f"{policy}-{name}-{dist.get_rank()}.json").write_text(json.dumps(placed))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
