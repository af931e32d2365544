# SPDX-License-Identifier: Apache-2.0
"""``embodix doctor [overrides]``: what is installed, what works here, and what a config needs and lacks."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from embodix.cli.command_line import require_readable
from embodix.cli.hydra_app import explain
from embodix.config.compose import compose
from embodix.doctor.console import show
from embodix.doctor.needs import diagnose, missing_places
from embodix.plugins import load_plugins

WIDTH_OF_FILES = 150


def run(argv: list[str]) -> int:
    """Examine the installation for a config.

    Args:
        argv: Hydra overrides as for the verb, plus ``--json`` and ``--config-name``.

    Returns:
        0 when everything that the config needs works, else 1.
    """
    arguments = _parser().parse_args(argv)
    registry = load_plugins()
    config, fault = _compose(arguments.config_name, arguments.overrides)
    diagnosis = diagnose(registry, config)
    diagnosis.overrides = arguments.overrides
    if fault:
        diagnosis.needs.append(fault)
    if config is not None:
        diagnosis.needs += missing_places(config, arguments.overrides)
    if arguments.json:
        print(json.dumps(asdict(diagnosis), indent=2))
    else:
        show(diagnosis, Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES))
    return 1 if diagnosis.needs else 0


def _compose(config_name: str, overrides: list[str]) -> tuple[DictConfig | None, str | None]:
    """The config, or None and why it can't be composed: the rest of the examination goes on without it."""
    try:
        require_readable(overrides)
        return compose(config_name, overrides), None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        return None, explain(error, config_name, overrides)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="embodix doctor",
        description="Shows plugins, implementations, patches, host versions and this machine; exits with 1 when "
        "something that the given config needs is broken.",
    )
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, as for `lerobot train`")
    parser.add_argument("--config-name", default="train", help="the config to check (default: train)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser
