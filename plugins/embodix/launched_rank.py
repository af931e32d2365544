# SPDX-License-Identifier: Apache-2.0
"""Which of a run's processes this is, by what its launcher has set, before there is an accelerator."""

from __future__ import annotations

import os

# Those that accelerate reads.
RANK_VARIABLES = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
SIZE_VARIABLES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def is_first_rank() -> bool:
    """Whether this process is the one of its run that writes."""
    return _first_of(RANK_VARIABLES, 0) == 0


def launched_processes() -> int:
    """Processes that this run was started with."""
    return _first_of(SIZE_VARIABLES, 1)


def _first_of(names: tuple[str, ...], default: int) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), default)
