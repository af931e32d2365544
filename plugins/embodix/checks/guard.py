# SPDX-License-Identifier: Apache-2.0
"""The check before a run: what is wrong stops it, or is said, as ``check=`` asks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lerobot.configs.train import TrainPipelineConfig

from embodix.checks.dataset_check import check_data
from embodix.checks.dataset_tables import DatasetTables, read_tables
from embodix.checks.findings import CheckReport
from embodix.launched_rank import is_first_rank

MODES = ("error", "warn", "off")
NAMED_ERRORS = 12  # in a message; the page has all


def require_sound_data(
    host_cfg: TrainPipelineConfig, config: Mapping[str, Any], may_be_absent: bool = False
) -> CheckReport | None:
    """Check the data of a run that is about to start, once for all its processes.

    Args:
        host_cfg: upstream's config.
        config: the composed config, resolved.
        may_be_absent: let a data set pass whose metadata are here and whose data are not.

    Raises:
        ValueError: data that can't be trained on under ``check=error``, or an unknown mode.
    """
    mode = check_mode(config)
    if mode == "off" or not is_first_rank():
        return None
    report = check_data(host_cfg, config, str(config["check"]["images"]), may_be_absent)
    if not report.num_frames and not report.findings:
        logging.warning("%s Fetch them first to have them checked.", report.verdict)
    stops = mode == "error" and report.errors
    for finding in report.warnings if stops else report.findings:
        logging.warning("%s", finding.sentence)
    if stops:
        raise ValueError(refusal(report))
    return report


def require_readable_metadata(root: Path, episodes: Sequence[int] | None = None) -> DatasetTables:
    """The metadata of a data set, whatever ``check`` asks for: nothing can be done without them.

    Args:
        root: its folder.
        episodes: numbers of those that are used, None for all.

    Raises:
        ValueError: a file of ``meta/`` is damaged or lacks a field, or an episode does not exist.
    """
    tables = read_tables(root, episodes)
    errors = [finding for finding in tables.findings if finding.severity == "error"]
    if errors:
        sentences = "\n  ".join(finding.sentence for finding in errors[:NAMED_ERRORS])
        raise ValueError(f"The metadata of the data set at {root} can't be used:\n  {sentences}")
    return tables


def check_mode(config: Mapping[str, Any]) -> str:
    """``check``.

    Raises:
        ValueError: another word.
    """
    mode = str(config["check"]["name"])
    if mode not in MODES:
        raise ValueError(f"check is one of {', '.join(MODES)}; got {mode!r}.")
    return mode


def refusal(report: CheckReport) -> str:
    """Why the data of a report are refused, each error with what to do."""
    lines = [f"The data can't be trained on: {report.verdict}"]
    lines += [f"  {finding.sentence}" for finding in report.errors[:NAMED_ERRORS]]
    if len(report.errors) > NAMED_ERRORS:
        lines.append(f"  and {len(report.errors) - NAMED_ERRORS} more")
    lines.append("`lerobot check` with the same overrides shows all as a page; check=warn trains anyway.")
    return "\n".join(lines)
