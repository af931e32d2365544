# SPDX-License-Identifier: Apache-2.0
"""One gloo rank of a short training: ``ddp_rank.py POLICY RANK PORT`` prints losses by variant."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from ddp_case import CASES
from torch.nn.parallel import DistributedDataParallel

from embodix.attention.cpu import SegmentAuto
from embodix.packing.layout import PaddingFreePacker
from embodix.policies.settings import FastPathSettings


def mean_count(count):
    dist.all_reduce(count)
    return count / dist.get_world_size()


def train(case, rank, variant):
    policy = case.build()
    if variant != "upstream":
        settings = FastPathSettings(PaddingFreePacker(), SegmentAuto(), action_pad=variant, reduce_count=mean_count)
        case.wrapper().install(policy, settings)
    parallel = DistributedDataParallel(policy, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    losses = []
    for step in range(3):
        batch = case.batch(policy, rank, 2 * step + rank)
        torch.manual_seed(step)
        loss, _ = parallel(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(case, rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    print("LOSSES", json.dumps({variant: train(case, rank, variant) for variant in ("upstream", "host", "mask")}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(CASES[sys.argv[1]], int(sys.argv[2]), sys.argv[3])
