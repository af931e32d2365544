# SPDX-License-Identifier: Apache-2.0
"""``lerobot rl``: reinforcement learning in RLinf, composed by Hydra."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from embodix.cli.hydra_app import INTERRUPTED, run_hydra_app


def rl_task(cfg: DictConfig) -> float:
    """Train once and return the rate of fresh frames after warm-up, the objective of a sweep."""
    from hydra.core.hydra_config import HydraConfig

    from embodix import plugins

    if cfg.strict_plugins:
        plugins.registry().require_healthy()

    from embodix_rl.rlinf.rl_run import run_rl

    folder, overrides = Path(HydraConfig.get().runtime.output_dir), list(HydraConfig.get().overrides.task)
    print(f"Run: {folder}")
    outcome = run_rl(cfg, overrides, folder)
    if outcome.rates is None:
        print(f"{len(outcome.steps)} training steps; none after warm-up, so no rate.")
        return 0.0
    print(outcome.rates)
    return outcome.rates.fresh_frames_per_s


def run(argv: list[str]) -> int:
    from embodix_rl.rlinf.hosts import RayStartError, WorkerFailedError, WorkersDifferError

    try:
        return run_hydra_app("rl", rl_task, argv)
    except (RayStartError, WorkersDifferError, WorkerFailedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; the run's own processes have been ended.", file=sys.stderr)
        return INTERRUPTED
