# SPDX-License-Identifier: Apache-2.0
"""``lerobot eval``: success of checkpoints in simulation, on fixed episodes, with interval, controls and pairs."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from embodix.cli.hydra_app import run_hydra_app
from embodix.schema.compose import compose

INTERRUPTED = 130  # the exit code of a shell for Ctrl-C


def eval_task(cfg: DictConfig) -> float:
    """Evaluate once and return the first evaluation's success rate, the objective of a sweep."""
    from hydra.core.hydra_config import HydraConfig

    from embodix import plugins

    output_dir, overrides = Path(HydraConfig.get().runtime.output_dir), list(HydraConfig.get().overrides.task)
    if cfg.resume is not None:
        output_dir = Path(cfg.resume)
        overrides = recorded_overrides(output_dir, overrides)
        cfg = compose("eval", [override for override in overrides if not override.startswith("hydra")])
        cfg.resume = str(output_dir)
    if cfg.strict_plugins:  # before the host is imported, which takes long
        plugins.registry().require_healthy()

    from embodix.evaluation.evaluate import PAGE_FILE, run_evaluation
    from embodix.report.evaluation_table import print_evaluations

    print(f"Results: {output_dir}")
    evaluations = run_evaluation(cfg, overrides, output_dir)
    print_evaluations(evaluations)
    print(f"Page: {output_dir / PAGE_FILE}")
    return evaluations[0].success.rate


def recorded_overrides(folder: Path, overrides: list[str]) -> list[str]:
    """The overrides of an interrupted evaluation.

    Raises:
        ValueError: no evaluation in the folder, or overrides beside ``resume``: other episodes could not be joined.
    """
    recorded, job = folder / ".hydra" / "overrides.yaml", folder / ".hydra" / "hydra.yaml"
    if not recorded.is_file() or OmegaConf.load(job).hydra.job.config_name != "eval":
        raise ValueError(f"resume={folder} is no folder of an evaluation ({recorded} of `lerobot eval` is missing).")
    others = [override for override in overrides if not override.startswith("resume=")]
    if others:
        raise ValueError(f"An evaluation is resumed as it was begun; leave out {', '.join(others)}.")
    return [str(override) for override in OmegaConf.load(recorded)]


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
