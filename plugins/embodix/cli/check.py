# SPDX-License-Identifier: Apache-2.0
"""``lerobot check``: whether the data of a run can be trained on, before anything is trained.

``--json`` prints the report as JSON and nothing else.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from embodix.cli.hydra_app import run_hydra_app

FOUND_WRONG = 3  # exit code: the command did its work and found errors


def run(argv: list[str]) -> int:
    as_json = "--json" in argv
    errors = 0

    def check_task(cfg: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig

        if as_json:
            logging.disable(logging.WARNING)  # Hydra's log goes to the standard output, too
        from embodix.checks.check_page import print_check, report_json, write_check
        from embodix.checks.dataset_check import check_data
        from embodix.training.host_config import decode_host_config

        nonlocal errors
        config: Any = OmegaConf.to_container(cfg, resolve=True)
        report = check_data(decode_host_config(cfg), config, cfg.check.images)
        if not report.num_frames and not report.findings:
            raise ValueError(
                f"{report.verdict} Fetch it: hf download <repo_id> --repo-type dataset --local-dir <dataset.root>."
            )
        errors += len(report.errors)
        page = write_check(report, Path(HydraConfig.get().runtime.output_dir))
        if as_json:
            print(report_json(report), end="")
        else:
            print_check(report, Console())
            print(f"Page: {page}")

    try:
        code = run_hydra_app("check", check_task, [argument for argument in argv if argument != "--json"])
    finally:
        logging.disable(logging.NOTSET)
    return code or (FOUND_WRONG if errors else 0)
