# SPDX-License-Identifier: Apache-2.0
"""``parallel=zero1|zero2|zero3``: what ZeRO's stages can train, and how the ranks are arranged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from embodix.contracts import PolicySupport, RankLayout, RunTraits
from embodix.parallel.mesh import sharding_faults
from embodix_deepspeed.library import why_missing
from embodix_deepspeed.placement import ZeroPlacement


class Zero1Strategy:
    """``parallel=zero1``: the optimizer's state and float32 master weights cut across ranks."""

    name = "zero1"
    keeps_whole = False
    stage = 1

    @staticmethod
    def needs() -> str | None:
        return why_missing()

    def layout(self, num_processes: int) -> RankLayout:
        if num_processes < 2:
            raise ValueError(
                f"parallel={self.name} cuts across 2 processes at least; {num_processes} was started. Start more "
                "(torchrun --nproc_per_node=2 -m embodix train ...), or choose parallel=single."
            )
        return RankLayout(data=num_processes)

    def faults(self, run: RunTraits, layout: RankLayout) -> Iterator[str]:
        missing = why_missing()
        if missing is not None:
            yield f"parallel={self.name} is carried out by DeepSpeed. {missing}, or choose parallel=fsdp2."
        if run.precision != "none":
            yield (
                f"parallel={self.name} computes in the policy's own dtype; got precision={run.precision}. Choose "
                "precision=none, or parallel=ddp."
            )

        mixed = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if mixed not in ("", "no"):
            yield (
                f"parallel={self.name} computes in the policy's own dtype: DeepSpeed turns an autocast around it off; "
                f"got mixed_precision={mixed} of accelerate's launcher. Start with torchrun, or choose parallel=ddp."
            )

    def place(
        self, policy: Any, optimizer: Any, device: torch.device, layout: RankLayout, support: PolicySupport
    ) -> ZeroPlacement:
        return ZeroPlacement(policy, optimizer, device, layout, self.stage)


class Zero2Strategy(Zero1Strategy):
    """``parallel=zero2``: gradients, too."""

    name = "zero2"
    stage = 2


class Zero3Strategy(Zero1Strategy):
    """``parallel=zero3``: parameters, too."""

    name = "zero3"
    stage = 3

    def layout(self, num_processes: int) -> RankLayout:
        return RankLayout(shard=super().layout(num_processes).data)

    def faults(self, run: RunTraits, layout: RankLayout) -> Iterator[str]:
        yield from super().faults(run, layout)
        yield from sharding_faults(self.name, run, layout)
