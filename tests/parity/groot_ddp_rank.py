# SPDX-License-Identifier: Apache-2.0
"""One gloo rank of a short GR00T training: ``groot_ddp_rank.py RANK PORT`` prints losses by variant."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from embodix.attention.segment import SegmentAuto
from embodix.packing.packers import PaddingFreePacker
from embodix.policies.groot_n15.wrapper import GrootN15Wrapper
from embodix.policies.settings import FastPathSettings
from embodix.testing.groot import random_batch, small_groot


def mean_count(count):
    dist.all_reduce(count)
    return count / dist.get_world_size()


def train(rank, variant):
    policy = small_groot(tune_llm=True, tune_visual=True)
    if variant != "upstream":
        settings = FastPathSettings(PaddingFreePacker(), SegmentAuto(), action_pad=variant, reduce_count=mean_count)
        GrootN15Wrapper().install(policy, settings)
    parallel = DistributedDataParallel(policy, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    losses = []
    for step in range(3):
        batch = random_batch(policy, [5, 5], [2, 2], seed=2 * step + rank)
        batch["action_is_pad"] = (torch.arange(16) >= (4 if rank else 11)).expand(2, -1)
        torch.manual_seed(step)
        loss, _ = parallel(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    print("LOSSES", json.dumps({variant: train(rank, variant) for variant in ("upstream", "host", "mask")}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
