# SPDX-License-Identifier: Apache-2.0
"""``lerobot data <source>``: record demonstrations from a simulator into a LeRobotDataset."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from embodix import plugins
from embodix.arguments import typed_arguments
from embodix.cli.hydra_app import INTERRUPTED, run_hydra_app
from embodix.config.compose import options_of
from embodix.data.recorded_dataset import RecordedDataset

# Of findings, those whose weight depends on how the policy normalises, and on the run's names, joins and instructions.
MATTERS_OF_A_RUN = (
    *("statistics_missing", "statistics_name", "statistics_shape", "statistics_not_finite", "statistics_inverted"),
    *("statistics_of_other_data", "quantiles_averaged", "normalised_large"),
    *("key_missing", "camera_missing", "instruction_empty"),
)


def data_task(cfg: DictConfig) -> None:
    """Record with the registered data source that the config names.

    Raises:
        ValueError: it names none, settings that the source does not have, or what was recorded is damaged.
    """
    fields: Any = OmegaConf.to_container(cfg, resolve=True)
    if "source" not in fields:
        raise ValueError(f"Name what to record: lerobot data <{'|'.join(options_of('data'))}> root=<folder>.")
    source = str(fields.pop("source"))
    record = plugins.resolve("data_sources", source)
    recorded = record(_settings(fields, source))
    if isinstance(recorded, RecordedDataset):
        _check(recorded.root)


def _check(root: Path) -> None:
    """Print what is found in a recording; the run that will read it is not known yet.

    Raises:
        ValueError: its files or metadata are damaged.
    """
    from embodix.checks.dataset_check import check_dataset
    from embodix.checks.dataset_reading import read_dataset
    from embodix.checks.run_needs import RunNeeds

    needs = RunNeeds("any", {"STATE": "QUANTILES", "ACTION": "QUANTILES"}, language=True)
    report = check_dataset(str(root), read_dataset(root), needs)
    print("\n".join([f"Checked {report.verdict}", *(finding.sentence for finding in report.findings)]))
    damage = [finding.sentence for finding in report.errors if finding.kind not in MATTERS_OF_A_RUN]
    if damage:
        raise ValueError(f"The data set at {root} is damaged; remove it and record it again:\n  " + "\n  ".join(damage))
    if report.findings:
        print("It was looked at as if normalised by quantiles; `lerobot check` judges it for the policy of a run.")


def _settings(fields: dict[str, Any], source: str) -> Any:
    """An instance of the class that ``_target_`` names; the plain fields where there is none."""
    target = fields.pop("_target_", None)
    if target is None:
        return instantiate(fields, _convert_="all")
    settings = get_class(target)
    return settings(**typed_arguments(settings, instantiate(fields, _convert_="all"), f"lerobot data {source}"))


def run(argv: list[str]) -> int:
    """The first word may name the source: ``<source>`` is ``data=<source>``."""
    if argv and not argv[0].startswith("-") and "=" not in argv[0]:
        argv = [f"data={argv[0]}", *argv[1:]]
    # Ended as by Ctrl-C, so that rendering processes end with this one.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run_hydra_app("data", data_task, argv)
    except KeyboardInterrupt:
        print(
            "Interrupted. `root` holds no half-written data set; the same command goes on with what was recorded, or "
            "begins again where the source keeps nothing.",
            file=sys.stderr,
        )
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
