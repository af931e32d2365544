# SPDX-License-Identifier: Apache-2.0
"""``lerobot quantize CHECKPOINT OUT``: a checkpoint in low precision, its table of sizes, an optional accuracy gate."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from embodix.cli.hydra_app import run_hydra_app
from embodix.cli.positions import named_arguments

GATE = {"--gate": "gate.enabled=true"}


def quantize_task(cfg: DictConfig) -> float:
    """Quantize once and return the share of the bytes that is saved, the objective of a sweep."""
    from hydra.core.hydra_config import HydraConfig

    from embodix import plugins

    if cfg.strict_plugins:  # before the host is imported, which takes long
        plugins.registry().require_healthy()

    from embodix.quantization.quantize_run import PAGE_FILE, run_quantization
    from embodix.report.quantization_page import print_quantization

    hydra_cfg = HydraConfig.get()
    output_dir = Path(hydra_cfg.runtime.output_dir)
    record = run_quantization(cfg, list(hydra_cfg.overrides.task), output_dir)
    print_quantization(record)
    print(f"Page: {output_dir / PAGE_FILE}")
    return float(record["sizes"]["total"]["reduction"])


def run(argv: list[str]) -> int:
    """Two words without a name are the checkpoint and the folder to write; ``--gate`` is ``gate.enabled=true``."""
    try:
        arguments = named_arguments("quantize", [GATE.get(word, word) for word in argv])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return run_hydra_app("quantize", quantize_task, arguments)
