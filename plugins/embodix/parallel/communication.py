# SPDX-License-Identifier: Apache-2.0
"""What a rank exchanges with the others, counted where torch hands it to the process group."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

LIBRARIES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
NO_DATA = ("barrier", "monitored_barrier_", "wait_tensor")
# By the operators' names without underscores at their ends: _allgather_base_, all_gather_into_tensor_coalesced.
KINDS: Mapping[str, str] = {
    r"all_?reduce": "all-reduce",
    r"all_?gather": "all-gather",
    r"reduce_?scatter": "reduce-scatter",
    r"all_?to_?all": "all-to-all",
    r"broadcast": "broadcast",
    r"reduce": "reduce",
    r"gather": "gather",
    r"scatter": "scatter",
    r"send": "send",
    r"recv": "receive",
}


@dataclass(frozen=True)
class Traffic:
    """Calls of one kind.

    Attributes:
        num_bytes: of the whole tensor of each call: what an all-reduce sums, what an all-gather gives, what a
            reduce-scatter takes.
    """

    num_calls: int
    num_bytes: int


class CommunicationCounter(TorchDispatchMode):
    """A context in which all that this thread exchanges is counted, also what C++ exchanges for it (DDP's buckets).

    Attributes:
        traffic: by kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[str, list[int]] = defaultdict(list)

    @property
    def traffic(self) -> dict[str, Traffic]:
        return {kind: Traffic(len(sizes), sum(sizes)) for kind, sizes in self._calls.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again as the tensors and collectives that it is made of
        result = func(*args, **(kwargs or {}))
        name = func._opname
        if func.namespace in LIBRARIES and name not in NO_DATA:
            self._calls[kind_of(name)].append(max(_bytes_of(part) for part in (*args, result)))
        return result


def kind_of(operator: str) -> str:
    """``all-gather`` for ``_allgather_base_``; an operator that is not known is its own kind."""
    name = operator.strip("_")
    return next((kind for pattern, kind in KINDS.items() if re.match(pattern, name)), name)


def _bytes_of(part: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(part))


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, (list, tuple)):
        for item in part:
            yield from _tensors(item)
