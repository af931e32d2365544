# SPDX-License-Identifier: Apache-2.0
"""Share the cores between the jobs of a parallel sweep."""

from __future__ import annotations

from typing import Any

import psutil
import torch


def limit_threads_for_launcher(launcher: Any) -> None:
    """Give each job of a joblib sweep its share of the cores; a lone job keeps torch's default.

    Args:
        launcher: Hydra's launcher node; joblib's has ``n_jobs`` (-1 for one job a core).
    """
    num_jobs = launcher.get("n_jobs") if launcher is not None else None
    if num_jobs in (None, 1):
        return
    num_cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    num_jobs = num_cores if num_jobs < 1 else num_jobs
    torch.set_num_threads(max(1, num_cores // num_jobs))
