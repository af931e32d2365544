# SPDX-License-Identifier: Apache-2.0
"""Every layer cut across ranks that train on the same samples, alone or together with copies and FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from embodix.contracts import PolicySupport, RankLayout, RunTraits
from embodix.parallel.mesh import MeshPlacement, require_divisor


class TensorParallelStrategy:
    """``parallel=tensor``: each rank computes a part of every layer.

    Args:
        size: ranks that share every layer, on the same samples; null for all that ``shard`` leaves.
        shard: ranks with samples of their own that cut what is left between them, as FSDP2 does. The rest of the
            processes train copies.
    """

    name = "tensor"
    keeps_whole = False

    def __init__(self, size: int | None = None, shard: int = 1) -> None:
        self._size, self._shard = size, shard

    def layout(self, num_processes: int) -> RankLayout:
        require_divisor("parallel.options.shard", self._shard, num_processes)
        left = num_processes // self._shard
        size = left if self._size is None else self._size
        require_divisor("parallel.options.size", size, left)
        return RankLayout(data=left // size, shard=self._shard, tensor=size)

    def faults(self, run: RunTraits, layout: RankLayout) -> Iterator[str]:
        if layout.tensor < 2:
            yield (
                f"parallel=tensor cuts layers across 2 ranks at least; got {layout.tensor}. Start more processes, or "
                "choose parallel=ddp."
            )
        if not run.support.offers("tensor_plan"):
            yield (
                f"parallel=tensor cuts the layers that a policy's record plans, and {run.support.display_name}'s has "
                "no plan. Choose parallel=fsdp2 or parallel=ddp."
            )
        elif not run.packed:
            yield (
                "parallel=tensor cuts layers as the packed computation reads them; got packing=none with "
                "attention=upstream and vision_tokens=upstream. Add +plugin=embodix, or choose parallel=ddp."
            )
        if run.precision != "none":
            yield (
                f"parallel=tensor cuts plain linear layers, which a training precision replaces; got "
                f"precision={run.precision}. Choose precision=none, or parallel=fsdp2."
            )

    def place(
        self, policy: Any, optimizer: Any, device: torch.device, layout: RankLayout, support: PolicySupport
    ) -> MeshPlacement:
        return MeshPlacement(policy, optimizer, device, layout, support)
