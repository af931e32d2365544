# SPDX-License-Identifier: Apache-2.0
"""``lerobot train``: upstream's training, composed by Hydra."""

from __future__ import annotations

import sys
from typing import Any

from omegaconf import DictConfig

from embodix.cli.hydra_app import INTERRUPTED, run_hydra_app, write_hydra_record
from embodix.cli.ranks import with_first_ranks_folder
from embodix.launched_rank import is_first_rank


def train_task(cfg: DictConfig) -> float:
    """Train once and return the mean loss of the last tenth of the steps, the objective of a sweep."""
    from hydra.core.hydra_config import HydraConfig

    from embodix import plugins

    if cfg.strict_plugins:  # before the host is imported, which takes long
        plugins.registry().require_healthy()

    from embodix.costs.batch_size import settle_batch_size
    from embodix.training.run import run_training

    limit_threads_for_launcher(HydraConfig.get().launcher)
    cfg, overrides = settle_batch_size(cfg, list(HydraConfig.get().overrides.task))
    return run_training(cfg, overrides, begun=lambda: write_hydra_record(cfg)).final_loss


def limit_threads_for_launcher(launcher: Any) -> None:
    """Give each job of a joblib sweep its share of the cores; a lone job keeps torch's default.

    Args:
        launcher: Hydra's launcher node; joblib's has ``n_jobs`` (-1 for one job a core).
    """
    num_jobs = launcher.get("n_jobs") if launcher is not None else None
    if num_jobs in (None, 1):
        return
    import psutil
    import torch

    num_cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    num_jobs = num_cores if num_jobs < 1 else num_jobs
    torch.set_num_threads(max(1, num_cores // num_jobs))


def run(argv: list[str]) -> int:
    try:
        return run_hydra_app("train", train_task, with_first_ranks_folder("train", argv))
    except KeyboardInterrupt as interruption:
        if is_first_rank():
            print(str(interruption) or "Interrupted; the last checkpoint is whole.", file=sys.stderr)
        return INTERRUPTED
