# SPDX-License-Identifier: Apache-2.0
"""What runs, read back from every rank before the first step, against what was asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object

from embodix.contracts import PlacedBytes, Placement, RankLayout
from embodix.parallel.optimizer_state import local_bytes, optimizer_bytes

MOST_HELD = 0.75  # of a policy that two ranks or more share, on one of them


class NotAsRequestedError(RuntimeError):
    """What runs is not what the config asks for."""


@dataclass(frozen=True)
class RankReport:
    """One rank, before the first step.

    Attributes:
        rank, world: as the process group counts them.
        strategy: what spreads the run, in words of the one that does.
        backend: what exchanges between ranks.
        placed: bytes that it holds.
    """

    rank: int
    world: int
    strategy: str
    backend: str
    placed: PlacedBytes

    @property
    def line(self) -> str:
        """For the log."""
        placed = self.placed
        return (
            f"rank {self.rank} of {self.world}: {self.strategy}, {self.backend}; parameters {_mib(placed.sharded)} "
            f"cut, {_mib(placed.replicated)} whole, of {_mib(placed.total)}; optimizer {_mib(placed.optimizer)}"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f} MiB"


def require_one_run(found: int, launched: int) -> None:
    """Check that the processes that were started have found each other.

    Raises:
        NotAsRequestedError: they have not, so that several would each call themselves the first.
    """
    if found != launched:
        raise NotAsRequestedError(
            f"{launched} processes were started as one run, and this one is in a group of {found}: each group would "
            "call one of its own the first, and all write the same files. On CPUs set policy.device=cpu; else start "
            "the processes with torchrun, one a device."
        )


def require_effective(name: str, layout: RankLayout, reports: Sequence[RankReport]) -> None:
    """Check every rank's report against the config.

    Args:
        name: the option of ``parallel``.
        layout: as it was asked for.

    Raises:
        NotAsRequestedError: other ranks than there should be, another strategy, or a policy that nobody has cut.
    """
    ranks = sorted(report.rank for report in reports)
    if ranks != list(range(layout.num_processes)) or any(r.world != layout.num_processes for r in reports):
        raise _differs(name, f"{layout.num_processes} ranks", f"ranks {ranks}", reports)
    strategies = sorted({report.strategy for report in reports})
    if len(strategies) != 1 or strategies[0].startswith("accelerate's"):
        raise _differs(name, "one strategy, of the config, on every rank", " and ".join(strategies), reports)
    parts = layout.shard * layout.pipeline * layout.tensor
    held = max((r.placed.sharded + r.placed.replicated) / max(1, r.placed.total) for r in reports)
    if parts > 1 and held > MOST_HELD:
        what = f"a rank that holds {held:.0%} of the parameters"
        raise _differs(name, f"parameters in {parts} parts", what, reports)


def _differs(name: str, wanted: str, found: str, reports: Sequence[RankReport]) -> NotAsRequestedError:
    lines = "".join(f"\n  {report.line}" for report in reports)
    return NotAsRequestedError(f"parallel={name} asks for {wanted}; what runs has {found}:{lines}")


def described(name: str, layout: RankLayout, reports: Sequence[RankReport]) -> dict[str, Any]:
    """For the manifest of a run."""
    return {
        "name": name,
        "layout": dataclasses.asdict(layout),
        "ranks": [dataclasses.asdict(report) for report in reports],
    }


HOST_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def rank_reports(
    policy: Any, optimizer: Any, placement: Placement | None, accelerator: Accelerator
) -> list[RankReport]:
    """The reports of all ranks; every rank must ask.

    Args:
        policy: the bare one, whose parameters are counted where accelerate has prepared it.
        optimizer: as prepared.
        placement: what has taken the policy over; None for accelerate.
    """
    grouped = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    if placement is not None:
        own = RankReport(rank, world, placement.strategy, placement.backend, placement.placed_bytes())
    else:
        backend = dist.get_backend() if grouped else "alone"
        own = RankReport(rank, world, _hosts_strategy(accelerator), backend, _whole(policy, optimizer))
    return list(gather_object([own])) if world > 1 else [own]


def _hosts_strategy(accelerator: Accelerator) -> str:
    found = accelerator.distributed_type
    if found not in HOST_TYPES:
        return f"accelerate's {found.value}"
    return "one process" if found == DistributedType.NO else "DDP"


def _whole(policy: Any, optimizer: Any) -> PlacedBytes:
    held = sum(local_bytes(parameter) for parameter in policy.parameters())
    return PlacedBytes(0, held, optimizer_bytes(getattr(optimizer, "optimizer", optimizer)), held)
