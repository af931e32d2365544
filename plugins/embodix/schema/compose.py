# SPDX-License-Identifier: Apache-2.0
"""Compose a config as a verb would, inside or outside a running Hydra application."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from embodix import plugins

CONFIG_MODULE = "embodix.hydra_conf"


def register_schemas() -> None:
    """Make every verb's schema known to Hydra."""
    for register in plugins.registry().resolve_all("schemas").values():
        register()


def config_packages() -> list[str]:
    """Packages that hold config groups, embodix's own first."""
    registered = plugins.registry().implementations["config_packages"].values()
    found = [registration.target.partition(":")[0] for registration in registered]
    return sorted(found, key=lambda package: package != CONFIG_MODULE)


def options_of(group: str) -> list[str]:
    """Every option of a config group, of all packages; without the alias that stands for the default."""
    folders = [files(package) / group for package in config_packages()]
    found = {
        Path(f.name).stem for folder in folders if folder.is_dir() for f in folder.iterdir() if f.name[-5:] == ".yaml"
    }
    return sorted(found - {"default"})


def compose(config_name: str, overrides: list[str]) -> DictConfig:
    """Compose ``config_name`` from all config groups.

    Raises:
        hydra.errors.HydraException: a group, option or field that does not exist.
    """
    register_schemas()
    if GlobalHydra.instance().is_initialized():
        return hydra.compose(config_name, overrides=overrides)
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        return hydra.compose(config_name, overrides=overrides)
