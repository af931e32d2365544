# SPDX-License-Identifier: Apache-2.0
"""``lerobot train``: upstream's training, composed by Hydra."""

from __future__ import annotations

from omegaconf import DictConfig

from embodix.cli.hydra_app import run_hydra_app


def train_task(cfg: DictConfig) -> float:
    """Train once and return the mean loss of the last tenth of the steps, the objective of a sweep."""
    from hydra.core.hydra_config import HydraConfig

    from embodix import plugins

    if cfg.strict_plugins:  # before the host is imported, which takes long
        plugins.registry().require_healthy()

    from embodix.training.run import run_training
    from embodix.training.threads import limit_threads_for_launcher

    limit_threads_for_launcher(HydraConfig.get().launcher)
    return run_training(cfg, list(HydraConfig.get().overrides.task)).final_loss


def run(argv: list[str]) -> int:
    return run_hydra_app("train", train_task, argv)
