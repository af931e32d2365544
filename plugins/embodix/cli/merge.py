# SPDX-License-Identifier: Apache-2.0
"""``lerobot merge CHECKPOINT OUT``: a plain policy of a checkpoint with adapters."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from embodix.cli.hydra_app import run_hydra_app
from embodix.cli.positions import POSITIONS, named_arguments


def merge_task(cfg: DictConfig) -> None:
    """Merge once and say what to do with the result."""
    from embodix import plugins

    missing = [name for name in POSITIONS if OmegaConf.is_missing(cfg, name)]
    if missing:
        raise ValueError(f"lerobot merge needs a checkpoint with adapters; got none. {USAGE}")
    if cfg.strict_plugins:  # before the host is imported, which takes long
        plugins.registry().require_healthy()

    from embodix.checkpoints.merging import merge_adapters
    from embodix.checkpoints.model_folder import find_model

    merged = merge_adapters(find_model(cfg.checkpoint), Path(cfg.output), cfg.base, cfg.tokenizer.directory)
    print(f"{merged.num_adapters} adapters are merged into {merged.base}: {cfg.output}")
    print(f"Plain LeRobot loads it, and lerobot eval checkpoint={cfg.output}, lerobot quantize {cfg.output} FOLDER.")


USAGE = "Give a run, a checkpoint or its pretrained_model, and a folder to write: lerobot merge outputs/.../run FOLDER."


def run(argv: list[str]) -> int:
    """Two words without a name are the checkpoint and the folder to write."""
    try:
        arguments = named_arguments("merge", argv)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return run_hydra_app("merge", merge_task, arguments)
