# SPDX-License-Identifier: Apache-2.0
"""How a run was spread over its ranks, what each held and what it exchanged, as its manifest states it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embodix.report.words import count

# Dimension of a layout -> what its ranks are, in the order in which they are said.
DIMENSIONS = {"data": "copies", "shard": "shards", "pipeline": "stages", "tensor": "tensor parts"}
COUNTED = (
    "Counted in the first step of the first rank, at the calls of torch's process group: everything between the "
    "forward pass and the end of the optimizer's step, DDP's buckets and the totals of the step included. A call "
    "counts with its whole tensor: what an all-reduce sums, what an all-gather gives, what a reduce-scatter takes. An "
    "all-reduce moves each byte about twice, the others once."
)


@dataclass(frozen=True)
class Exchange:
    """Calls of one kind in one step, with the bytes of their whole tensors."""

    kind: str
    num_calls: int
    num_bytes: int


@dataclass(frozen=True)
class RanksSummary:
    """One run of several ranks; bytes are those of the rank that holds most of each.

    Attributes:
        strategy: what spread it, in words, with the backend: ``FSDP2 over gloo``.
        layout: in words: ``2 shards``.
        cut_bytes: of parameters of which other ranks hold other parts.
        whole_bytes: of parameters that each rank holds whole.
        optimizer_bytes: of the optimizer's state, after the last step.
        policy_bytes: of all parameters, as one process holds them.
        splits_work: whether ranks share the operations of one sample, so that one rank's count is a part.
        exchanges: of one step; empty where none was counted.
    """

    strategy: str
    num_ranks: int
    layout: str
    cut_bytes: int
    whole_bytes: int
    optimizer_bytes: int
    policy_bytes: int
    splits_work: bool
    exchanges: list[Exchange]

    @property
    def held_bytes(self) -> int:
        return self.cut_bytes + self.whole_bytes + self.optimizer_bytes

    @property
    def exchanged_bytes(self) -> int | None:
        return sum(exchange.num_bytes for exchange in self.exchanges) if self.exchanges else None

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> RanksSummary | None:
        """Read a manifest's ``settings``; None for one process, or where nothing is recorded."""
        recorded = settings.get("parallel") or {}
        ranks = recorded.get("ranks") or []
        if len(ranks) < 2:
            return None
        layout = recorded["layout"]
        sizes = [(layout[name], noun) for name, noun in DIMENSIONS.items() if layout[name] > 1]
        most = {key: max(rank["placed"][key] for rank in ranks) for key in ranks[0]["placed"]}
        traffic = recorded.get("communication") or {}
        return cls(
            strategy=f"{ranks[0]['strategy']} over {ranks[0]['backend']}",
            num_ranks=len(ranks),
            layout=" × ".join(f"{size} {noun}" for size, noun in sizes),
            cut_bytes=most["sharded"],
            whole_bytes=most["replicated"],
            optimizer_bytes=most["optimizer"],
            policy_bytes=most["total"],
            splits_work=layout["tensor"] * layout["pipeline"] > 1,
            exchanges=[Exchange(kind, calls["num_calls"], calls["num_bytes"]) for kind, calls in traffic.items()],
        )


def exchange_words(ranks: RanksSummary) -> str:
    """``all-reduce 12 calls``, most bytes first."""
    ordered = sorted(ranks.exchanges, key=lambda exchange: -exchange.num_bytes)
    return ", ".join(f"{exchange.kind} {count(exchange.num_calls, 'call')}" for exchange in ordered)
