# SPDX-License-Identifier: Apache-2.0
"""Compose a config as a verb would, inside or outside a running Hydra application, and the one a run was begun with."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from embodix import plugins
from embodix.config.closed import require_known_keys
from embodix.plugins import FAILURES, PluginError, PluginRegistry

CONFIG_MODULE = "embodix.hydra_conf"


def register_schemas(config_name: str) -> None:
    """Make schemas known to Hydra: all, without those of other primary configs where this one has its own.

    Raises:
        embodix.plugins.PluginError: one that can't be imported or fails.
    """
    registry = plugins.registry()
    names = registry.names("schemas")
    others = set(config_names()) - {config_name} if config_name in names else ()
    for name in names:
        if name not in others:
            _register_schema(registry, name)


def _register_schema(registry: PluginRegistry, name: str) -> None:
    register = registry.resolve("schemas", name)
    try:
        register()
    except FAILURES as error:
        raise PluginError(
            f"schema {name!r} of plugin {registry.providers['schemas', name]!r} can't be registered: "
            f"{type(error).__name__}: {error}. Repair or uninstall the plugin."
        ) from error


def config_packages() -> list[str]:
    """Packages that hold config groups, embodix's own first."""
    registered = plugins.registry().implementations["config_packages"].values()
    found = [registration.target.partition(":")[0] for registration in registered]
    return sorted(found, key=lambda package: package != CONFIG_MODULE)


def config_names() -> list[str]:
    """Names of the primary configs of all packages."""
    found = [file for package in config_packages() for file in files(package).iterdir()]
    return sorted(Path(file.name).stem for file in found if file.name.endswith(".yaml"))


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
        embodix.config.closed.UnknownKeyError: a key that was added and that no schema knows.
    """
    register_schemas(config_name)
    if GlobalHydra.instance().is_initialized():
        config = hydra.compose(config_name, overrides=overrides)
    else:
        with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            config = hydra.compose(config_name, overrides=overrides)
    require_known_keys(config, config_name)
    return config


def compose_train(overrides: list[str]) -> DictConfig:
    """Compose the train config again, without Hydra's own overrides and without an output folder."""
    kept = [override for override in overrides if not override.lstrip("+~").startswith("hydra")]
    return compose("train", [*kept, "train.output_dir=null"])


def merge_overrides(recorded: list[str], added: list[str]) -> list[str]:
    """The recorded overrides with those of the same key replaced by the added ones.

    A group that is chosen anew does not take the options of the recorded choice.
    """
    replaced = {override.lstrip("+~").partition("=")[0] for override in added}
    of_replaced = tuple(f"{name}.options." for name in replaced)
    keys = [(override, override.lstrip("+~").partition("=")[0]) for override in recorded]
    kept = [override for override, key in keys if key not in replaced and not key.startswith(of_replaced)]
    return [*kept, *added]


def begun_overrides(folder: Path, config_name: str, verb: str, key: str, overrides: list[str]) -> list[str]:
    """The overrides that the run in a folder was begun with.

    Args:
        folder: that `key` names.
        config_name: the primary config of such a run.
        verb: its command, for messages.
        key: the override that resumes, without its value.
        overrides: of this command line; none but `key` may be among them, since a run is resumed as it was begun.

    Raises:
        ValueError: no such run in the folder, or other overrides.
    """
    recorded, job = folder / ".hydra" / "overrides.yaml", folder / ".hydra" / "hydra.yaml"
    if not recorded.is_file() or not job.is_file():
        raise ValueError(f"{key}={folder} is no folder of `{verb}` ({recorded} is missing).")
    begun = OmegaConf.load(job).hydra.job.config_name
    if begun != config_name:
        raise ValueError(f"{key}={folder} is no folder of `{verb}`: it was begun by the command of the config {begun}.")
    others = [word for word in overrides if not word.startswith(f"{key}=")]
    if others:
        raise ValueError(f"A run of `{verb}` is resumed as it was begun; leave out {', '.join(others)}.")
    return [str(word) for word in OmegaConf.load(recorded)]
