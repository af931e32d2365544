# SPDX-License-Identifier: Apache-2.0
"""Which of a run's processes this is, by what its launcher has set, before there is an accelerator."""

from __future__ import annotations

import os

RANK_VARIABLES = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")  # those that accelerate reads


def is_first_rank() -> bool:
    """Whether this process is the one of its run that writes."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0) == 0
