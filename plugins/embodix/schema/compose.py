# SPDX-License-Identifier: Apache-2.0
"""Compose a config as a verb would, inside or outside a running Hydra application."""

from __future__ import annotations

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from embodix.schema import eval as eval_schema
from embodix.schema import quantize as quantize_schema
from embodix.schema import rl as rl_schema
from embodix.schema import train as train_schema

CONFIG_MODULE = "embodix.hydra_conf"


def register_schemas() -> None:
    """Make every verb's schema known to Hydra."""
    train_schema.register()
    eval_schema.register()
    rl_schema.register()
    quantize_schema.register()


def compose(config_name: str, overrides: list[str]) -> DictConfig:
    """Compose ``config_name`` from embodix's config groups.

    Raises:
        hydra.errors.HydraException: a group, option or field that does not exist.
    """
    register_schemas()
    if GlobalHydra.instance().is_initialized():
        return hydra.compose(config_name, overrides=overrides)
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        return hydra.compose(config_name, overrides=overrides)
