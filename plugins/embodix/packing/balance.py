# SPDX-License-Identifier: Apache-2.0
"""Give each rank the same number of a step's bins and as nearly as possible the same cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def assign_to_ranks(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Indices of the bins of each rank, in the order of the bins.

    The dearest bin goes to the rank with the least so far that still has room (longest processing time first).

    Raises:
        ValueError: a number of bins that the ranks cannot share equally.
    """
    if num_ranks < 1 or len(costs) % num_ranks:
        raise ValueError(f"{len(costs)} bins cannot be shared equally by {num_ranks} ranks.")
    per_rank = len(costs) // num_ranks
    if per_rank == 1:
        return [[index] for index in range(num_ranks)]
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    load = np.zeros(num_ranks)
    for index in np.argsort(-np.asarray(costs), kind="stable"):
        rank = int(load.argmin())
        ranks[rank].append(int(index))
        load[rank] += costs[index]
        if len(ranks[rank]) == per_rank:
            load[rank] = np.inf
    return [sorted(bins) for bins in ranks]
