# SPDX-License-Identifier: Apache-2.0
"""``lerobot data <source>``: record demonstrations from a simulator into a LeRobotDataset."""

from __future__ import annotations

from typing import Any

from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from embodix import plugins
from embodix.arguments import typed_arguments
from embodix.cli.hydra_app import run_hydra_app
from embodix.config.compose import options_of


def data_task(cfg: DictConfig) -> None:
    """Record with the registered data source that the config names.

    Raises:
        ValueError: it names none.
    """
    fields: Any = OmegaConf.to_container(cfg, resolve=True)
    if "source" not in fields:
        raise ValueError(f"Name what to record: lerobot data <{'|'.join(options_of('data'))}> root=<folder>.")
    source = str(fields.pop("source"))
    record = plugins.resolve("data_sources", source)
    if settings := fields.get("_target_"):
        taken = {name: value for name, value in fields.items() if name != "_target_"}
        fields |= typed_arguments(get_class(settings), taken, f"lerobot data {source}")
    record(instantiate(fields, _convert_="all"))


def run(argv: list[str]) -> int:
    """The first word may name the source: ``<source>`` is ``data=<source>``."""
    if argv and not argv[0].startswith("-") and "=" not in argv[0]:
        argv = [f"data={argv[0]}", *argv[1:]]
    return run_hydra_app("data", data_task, argv)
