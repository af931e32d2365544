# SPDX-License-Identifier: Apache-2.0
"""``lerobot quantize CHECKPOINT OUT``: a checkpoint in low precision, its table of sizes, an optional accuracy gate."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from embodix.cli.hydra_app import run_hydra_app

POSITIONS = ("checkpoint", "output")
# Hydra's own options that are followed by a word of theirs.
TAKE_A_WORD = (
    *("-c", "--cfg", "-p", "--package", "-i", "--info", "-cp", "--config-path", "-cn", "--config-name"),
    *("-cd", "--config-dir", "--experimental-rerun", "-sc", "--shell-completion"),
)


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
        arguments = named_arguments(argv)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return run_hydra_app("quantize", quantize_task, arguments)


def named_arguments(argv: list[str]) -> list[str]:
    """The command line as Hydra takes it.

    In a multirun, every job writes a folder of its number below the one that is named.

    Raises:
        ValueError: more than two words without a name.
    """
    options: list[str] = []
    overrides: list[str] = []
    words: list[str] = []
    for before, word in zip(["", *argv], argv, strict=False):
        if word == "--gate":
            overrides.append("gate.enabled=true")
        elif word.startswith("-") or before in TAKE_A_WORD:
            options.append(word)
        elif "=" in word and not Path(word).exists():
            overrides.append(word)
        else:
            words.append(word)
    if len(words) > len(POSITIONS):
        raise ValueError(f"lerobot quantize takes {' and '.join(POSITIONS)}; got {', '.join(words)}.")
    if len(words) == len(POSITIONS) and {"-m", "--multirun"} & set(argv):
        words[1] += "/${hydra:job.num}"
    named = [f"{name}={_quoted(word)}" for name, word in zip(POSITIONS, words, strict=False)]
    return [*options, *named, *overrides]  # Hydra takes no option between overrides


def _quoted(word: str) -> str:
    """A value in Hydra's grammar, whatever characters it has."""
    escaped = word.replace("'", "\\'")
    return f"'{escaped}'"
