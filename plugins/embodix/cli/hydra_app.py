# SPDX-License-Identifier: Apache-2.0
"""Run a verb as a Hydra application, with errors that name the nearest match.

``--cfg``, ``--info``, ``--multirun``, launchers, sweepers and tab completion are Hydra's own.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embodix.config.compose import CONFIG_MODULE, compose, config_names, register_schemas
from embodix.patching import PatchError
from embodix.training.stopped import RunStoppedError

CONFIG_PACKAGE = f"pkg://{CONFIG_MODULE}"
FULL_ERROR = "HYDRA_FULL_ERROR"
INTERRUPTED = 130  # the exit code of a shell for Ctrl-C
NO_ROOM = "Make room; what was finished before is whole, and a run or evaluation is resumed with resume=<folder>."
NOT_ALLOWED = "Make that place writable, or give another folder with hydra.run.dir=<folder>."
CANNOT_BE_WRITTEN = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), NO_ROOM),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), NOT_ALLOWED),
}
USER_MISTAKES = (HydraException, OmegaConfBaseException)


def run_hydra_app(config_name: str, task: Callable[[DictConfig], Any], argv: list[str]) -> int:
    """Compose ``config_name`` with the overrides in ``argv`` and run ``task`` on it.

    Returns:
        0, or 1 after a user's mistake, or why a run stopped itself, was printed (HYDRA_FULL_ERROR=1 shows the
        traceback).
    """
    register_schemas(config_name)
    sys.argv = [sys.argv[0], *argv]
    wants_traceback = os.environ.get(FULL_ERROR) == "1"
    os.environ[FULL_ERROR] = "1"  # Hydra then raises instead of printing and leaving
    try:
        hydra.main(version_base="1.3", config_path=CONFIG_PACKAGE, config_name=config_name)(task)()
    except (*USER_MISTAKES, ValueError, PatchError, RunStoppedError, FileNotFoundError, FileExistsError) as error:
        if wants_traceback:
            raise
        print(f"error: {explain(error, config_name, argv)}", file=sys.stderr)
        print("(HYDRA_FULL_ERROR=1 shows the traceback)", file=sys.stderr)
        return 1
    except OSError as error:
        if wants_traceback or error.errno not in CANNOT_BE_WRITTEN:
            raise
        print(f"error: {error}. {CANNOT_BE_WRITTEN[error.errno]}", file=sys.stderr)
        return 1
    finally:
        os.environ[FULL_ERROR] = "1" if wants_traceback else "0"
    return 0


def write_hydra_record(cfg: DictConfig) -> None:
    """Write ``.hydra`` of the running command as Hydra does, for a config with ``hydra.output_subdir: null``.

    Hydra itself would write it before the command is looked at, and so replace that of a run which the command must
    not touch.
    """
    hydra_cfg = HydraConfig.get()
    folder = Path(hydra_cfg.runtime.output_dir) / ".hydra"
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(cfg, folder / "config.yaml")
    OmegaConf.save({"hydra": hydra_cfg}, folder / "hydra.yaml")
    OmegaConf.save(hydra_cfg.overrides.task, folder / "overrides.yaml")


def explain(error: BaseException, config_name: str, argv: list[str]) -> str:
    """The error's own message, followed by the nearest existing name for each override that has none."""
    message = _without_worker_trace(str(error).strip())
    cause = error.__cause__
    if cause is not None and str(cause).strip() not in message and isinstance(error, HydraException):
        message += f"\n{cause}"
    hints = []
    if isinstance(error, USER_MISTAKES):
        hints = _nearest_hints(config_name, [word for word in argv if "=" in word and not word.startswith("-")])
    return "\n".join([message, *hints])


def _without_worker_trace(message: str) -> str:
    """What was said in a loader's worker process, of which torch makes a message with the whole traceback."""
    named = list(re.finditer(r"^[\w.]+Error: ", message, re.MULTILINE))
    return message[named[-1].end() :] if named and re.match(r"Caught \w+ in DataLoader worker", message) else message


def _nearest_hints(config_name: str, words: list[str]) -> list[str]:
    overrides = _parsable_overrides(words)
    if misplaced := _misplaced_hints(config_name, overrides):
        return misplaced
    keys, groups = _known_names(config_name, overrides)
    hints = []
    for override in overrides:
        name = override.key_or_group
        if name in groups:
            hints += _option_hint(name, str(override.value()), groups[name])
        elif name not in keys and not name.startswith("hydra"):
            nearest = difflib.get_close_matches(name, sorted({*keys, *groups}), n=3)
            parent = name.rpartition(".")[0]
            hint = _did_you_mean(nearest) if nearest or parent not in groups else _choose_first(parent, groups[parent])
            hints.append(f"{name!r} is neither a group nor a field of {config_name}; {hint}")
    return hints


def _misplaced_hints(config_name: str, overrides: list[Override]) -> list[str]:
    """For experiments of other commands."""
    hints = []
    for line in (str(o.input_line) for o in overrides if o.key_or_group == "experiment"):
        if _composes(config_name, line):
            continue
        if fitting := [name for name in config_names() if name != config_name and _composes(name, line)]:
            hints.append(f"{line} belongs to {', '.join(fitting)}; {config_name} can't have it.")
    return hints


def _composes(config_name: str, override: str) -> bool:
    try:
        compose(config_name, [override])
    except USER_MISTAKES:
        return False
    return True


def _parsable_overrides(words: list[str]) -> list[Override]:
    """Those that follow Hydra's grammar; for the others Hydra's own message is all there is to say."""
    parser = OverridesParser.create()
    parsed = []
    for word in words:
        try:
            parsed += parser.parse_overrides([word])
        except HydraException:
            continue
    return parsed


def _option_hint(group: str, value: str, options: list[str]) -> list[str]:
    chosen = [option for option in re.split(r"[,\[\]\s]+", value) if option and option not in options]
    return [
        f"{option!r} is no option of group {group!r} ({', '.join(options)}); "
        + _did_you_mean(difflib.get_close_matches(option, options, n=3))
        for option in chosen
        if option != "None"
    ]


def _choose_first(group: str, options: list[str]) -> str:
    return f"choose an option of group {group!r} that has it: {group}=... ({', '.join(options)})."


def _did_you_mean(nearest: list[str]) -> str:
    return f"did you mean {' or '.join(nearest)}?" if nearest else "nothing is near it; --cfg job lists all."


def _known_names(config_name: str, overrides: list[Override]) -> tuple[list[str], dict[str, list[str]]]:
    """Every field (dotted) of the config with the options chosen so far, and every group with its options."""
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        groups = {group: loader.get_group_options(group) for group in loader.list_groups("")}
        chosen = [o.input_line for o in overrides if o.value() in groups.get(o.key_or_group, [])]
        config = hydra.compose(config_name, overrides=[line for line in chosen if line is not None])
    keys: list[str] = []
    _collect_keys(OmegaConf.to_container(config, resolve=False), "", keys)
    return keys, groups


def _collect_keys(node: Any, prefix: str, keys: list[str]) -> None:
    if isinstance(node, dict):
        for key, value in node.items():
            keys.append(f"{prefix}{key}")
            _collect_keys(value, f"{prefix}{key}.", keys)
