# SPDX-License-Identifier: Apache-2.0
"""What a rank holds and sends, counted from shapes by the rules by which torch cuts and exchanges.

Sources: torch.distributed.fsdp, which cuts the first dimension into chunks as ``torch.chunk`` does and pads the last
ones for the exchange; DDP, which copies all gradients into buckets. A ring of N ranks sends (N - 1) / N of what it
gathers or reduces from each, and twice that for an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from embodix.contracts import PlacedBytes, RankBytes, RankLayout, ShardUnit, StepUse
from embodix.policies.adapters import bare_policy

COUNT_BYTES = 4  # AdamW counts the steps of each parameter in a float32
MOMENTS = 2  # and keeps two tensors like the parameter


def whole_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor that nobody has cut."""
    return tensor.numel() * tensor.element_size()


def chunk_bytes(tensor: Tensor, num_ranks: int, rank: int) -> int:
    """Bytes of a rank's chunk of the first dimension; none for ranks that the rows do not reach."""
    rows = tensor.shape[0]
    longest = -(-rows // num_ranks)
    own = min(max(rows - rank * longest, 0), longest)
    return own * (whole_bytes(tensor) // max(rows, 1))


def padded_chunk_bytes(tensor: Tensor, num_ranks: int) -> int:
    """Bytes of a chunk as it is exchanged: that of the first rank."""
    return chunk_bytes(tensor, num_ranks, 0)


def replicated_rank_bytes(policy: Any, num_ranks: int, use: StepUse) -> RankBytes:
    """A copy of the policy on each rank; with more than one, DDP's buckets and its all-reduce."""
    named = dict(policy.named_parameters())
    total = sum(map(whole_bytes, named.values()))
    gradients = [named[name] for name in use.gradients]
    placed = PlacedBytes(0, total, adamw_bytes(gradients, whole_bytes), total)
    exchanged = [p for name, p in named.items() if p.requires_grad and name not in use.frozen]
    buckets = sum(map(whole_bytes, exchanged))
    if num_ranks == 1:
        return RankBytes(placed, sum(map(whole_bytes, gradients)), 0, {})
    sent = {"all-reduce of gradients": 2 * (num_ranks - 1) * buckets // num_ranks}
    return RankBytes(placed, sum(map(whole_bytes, gradients)), buckets, sent)


def adamw_bytes(parameters: Iterable[Tensor], part: Callable[[Tensor], int]) -> int:
    """Bytes of AdamW's state after a step, of the part of each parameter that a rank has a gradient of."""
    return sum(MOMENTS * part(parameter) + COUNT_BYTES for parameter in parameters)


@dataclass(frozen=True)
class _Gathered:
    """Parameters that are gathered together: a unit, or what is left for the root.

    Attributes:
        parameters, trained: all of them, and those that get a gradient.
        forward, backward: whether the pass gathers them.
    """

    parameters: Sequence[Tensor]
    trained: Sequence[Tensor]
    forward: bool
    backward: bool

    def chunk(self, num_ranks: int) -> int:
        return sum(padded_chunk_bytes(parameter, num_ranks) for parameter in self.parameters)

    def trained_chunk(self, num_ranks: int) -> int:
        return sum(padded_chunk_bytes(parameter, num_ranks) for parameter in self.trained)


def sharded_rank_bytes(
    policy: Any, units: Sequence[ShardUnit], layout: RankLayout, use: StepUse, rank: int = 0
) -> RankBytes:
    """Parameters cut across ``layout.shard`` ranks and gathered a unit at a time (FSDP2).

    The exchange holds the root's parameters and gradients whole, the largest two units that follow each other, and the
    whole gradients of the largest one.
    """
    index, shard = rank % layout.shard, layout.shard
    parameters = list(policy.parameters())

    def own(tensor: Tensor) -> int:
        return chunk_bytes(tensor, shard, index)

    *parts, root = _gathered(policy, units, use)
    trained = [parameter for part in (*parts, root) for parameter in part.trained]
    placed = PlacedBytes(
        sharded=sum(map(own, parameters)),
        replicated=0,
        optimizer=adamw_bytes(trained, own),
        total=sum(map(whole_bytes, parameters)),
    )
    exchange = shard * (root.chunk(shard) + root.trained_chunk(shard) + _most_of_units(parts, shard))
    return RankBytes(placed, sum(map(own, trained)), exchange, _sent(parts, root, layout))


def _gathered(policy: Any, units: Sequence[ShardUnit], use: StepUse) -> list[_Gathered]:
    """The parts that are gathered, the root last; a parameter that two share is the first one's."""
    bare, names = bare_policy(policy), {id(parameter): name for name, parameter in policy.named_parameters()}

    def gathered(parameters: Iterable[Tensor], forward: bool, backward: bool) -> _Gathered:
        own = [parameter for parameter in parameters if id(parameter) in names]
        trained = [parameter for parameter in own if names.pop(id(parameter)) in use.gradients]
        return _Gathered(own, trained, forward, backward)

    parts = []
    for unit in units:
        found = [parameter for path in unit.modules for parameter in bare.get_submodule(path).parameters()]
        distinct = {id(parameter): parameter for parameter in found}.values()
        parts.append(gathered(distinct, unit.entry in use.entered, use.entered.get(unit.entry, False)))
    return [*parts, gathered(policy.parameters(), True, False)]  # the root stays gathered for the backward pass


def _most_of_units(parts: Sequence[_Gathered], shard: int) -> int:
    """Bytes of a rank's chunks of what units hold gathered: two of them, and the gradients of one."""
    chunks = [part.chunk(shard) for part in parts if part.forward]
    two = max((first + second for first, second in pairwise(chunks)), default=sum(chunks))
    return two + max((part.trained_chunk(shard) for part in parts), default=0)


def _sent(parts: Sequence[_Gathered], root: _Gathered, layout: RankLayout) -> dict[str, int]:
    everything, others = (*parts, root), layout.shard - 1
    reduced = sum(part.trained_chunk(layout.shard) for part in everything)
    sent = {
        "all-gather forward": others * sum(part.chunk(layout.shard) for part in everything if part.forward),
        "all-gather backward": others * sum(part.chunk(layout.shard) for part in parts if part.backward),
        "reduce-scatter of gradients": others * reduced,
    }
    if layout.data > 1:
        sent["all-reduce of gradients"] = 2 * (layout.data - 1) * reduced // layout.data
    return sent
