# SPDX-License-Identifier: Apache-2.0
"""``lerobot eval``: success of checkpoints in simulation, on fixed episodes, with interval, controls and pairs."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from embodix.cli.hydra_app import INTERRUPTED, run_hydra_app, write_hydra_record
from embodix.config.compose import begun_overrides, compose


def eval_task(cfg: DictConfig) -> float:
    """Evaluate once and return the first evaluation's success rate, the objective of a sweep."""
    from hydra.core.hydra_config import HydraConfig

    from embodix import plugins

    output_dir, overrides = Path(HydraConfig.get().runtime.output_dir), list(HydraConfig.get().overrides.task)
    if cfg.resume is not None:
        output_dir = Path(cfg.resume)
        overrides = begun_overrides(output_dir, "eval", "lerobot eval", "resume", overrides)
        cfg = compose("eval", [override for override in overrides if not override.startswith("hydra")])
        cfg.resume = str(output_dir)
    if cfg.strict_plugins:  # before the host is imported, which takes long
        plugins.registry().require_healthy()

    from embodix.evaluation.evaluate import PAGE_FILE, run_evaluation
    from embodix.report.evaluation_page import print_evaluations

    print(f"Results: {output_dir}")
    evaluations = run_evaluation(cfg, overrides, output_dir, begun=lambda: write_hydra_record(cfg))
    print_evaluations(evaluations)
    print(f"Page: {output_dir / PAGE_FILE}")
    return evaluations[0].success.rate


def run(argv: list[str]) -> int:
    try:
        return run_hydra_app("eval", eval_task, argv)
    except KeyboardInterrupt:
        print(
            "Interrupted. The finished episodes are in episodes.jsonl of the folder above; `lerobot eval "
            "resume=<folder>` runs the rest.",
            file=sys.stderr,
        )
        return INTERRUPTED
