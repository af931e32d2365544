# SPDX-License-Identifier: Apache-2.0
"""Strategies that the host's accelerate carries out itself: one process, or a copy of the policy in each (DDP)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from embodix.contracts import PolicySupport, RankBytes, RankLayout, RunTraits, StepUse
from embodix.parallel.rank_bytes import replicated_rank_bytes


class HostStrategy:
    """``parallel=auto``: what upstream does, one process alone or DDP over several."""

    name = "auto"
    keeps_whole = True

    def layout(self, num_processes: int) -> RankLayout:
        return RankLayout(data=num_processes)

    def faults(self, run: RunTraits, layout: RankLayout) -> Iterator[str]:
        yield from ()

    def place(
        self, policy: Any, optimizer: Any, device: torch.device, layout: RankLayout, support: PolicySupport
    ) -> None:
        """None: accelerate prepares both."""

    def rank_bytes(
        self, policy: Any, layout: RankLayout, support: PolicySupport, use: StepUse, rank: int = 0
    ) -> RankBytes:
        return replicated_rank_bytes(policy, layout.data, use)


class SingleStrategy(HostStrategy):
    """``parallel=single``: one process."""

    name = "single"

    def layout(self, num_processes: int) -> RankLayout:
        if num_processes != 1:
            raise ValueError(
                f"parallel=single trains in one process; {num_processes} were started. Start one, or choose "
                "parallel=ddp."
            )
        return RankLayout()


class DataParallelStrategy(HostStrategy):
    """``parallel=ddp``: a copy of the policy in each of two processes or more."""

    name = "ddp"

    def layout(self, num_processes: int) -> RankLayout:
        if num_processes < 2:
            raise ValueError(
                f"parallel=ddp trains in 2 processes at least; {num_processes} was started. Start more "
                "(torchrun --nproc_per_node=2 -m embodix train ...), or choose parallel=single."
            )
        return RankLayout(data=num_processes)
