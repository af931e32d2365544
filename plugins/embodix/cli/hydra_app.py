# SPDX-License-Identifier: Apache-2.0
"""Run a verb as a Hydra application, with errors that name the nearest match.

``--cfg``, ``--info``, ``--multirun``, launchers, sweepers and tab completion are Hydra's own.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from embodix.cli.command_line import adds_search_path, require_readable, split_words
from embodix.cli.hints import USER_MISTAKES, hints_of
from embodix.cli.sweep import keep_failure, show_what_ended
from embodix.config.closed import require_known_hydra_keys, require_known_keys
from embodix.config.compose import CONFIG_MODULE, register_schemas
from embodix.patching import PatchError
from embodix.training.stopped import RunStoppedError

CONFIG_PACKAGE = f"pkg://{CONFIG_MODULE}"
FULL_ERROR = "HYDRA_FULL_ERROR"
WRONG_PATHS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
INTERRUPTED = 130  # the exit code of a shell for Ctrl-C
NO_ROOM = "Make room; what was finished before is whole, and a run or evaluation is resumed with resume=<folder>."
NOT_ALLOWED = "Make that place writable, or give another folder with hydra.run.dir=<folder>."
CANNOT_BE_WRITTEN = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), NO_ROOM),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), NOT_ALLOWED),
}


def run_hydra_app(config_name: str, task: Callable[[DictConfig], Any], argv: list[str]) -> int:
    """Compose ``config_name`` with the overrides in ``argv`` and run ``task`` on it.

    Returns:
        0, 1 after a user's mistake, or why a run stopped itself, was printed (HYDRA_FULL_ERROR=1 shows the traceback),
        or 2 for flags that there are none of.
    """
    sys.argv = [sys.argv[0], *argv]
    words, flags = split_words(argv)
    if flags:
        return refuse_flags(config_name, argv, flags)
    wants_traceback = os.environ.get(FULL_ERROR) == "1"
    os.environ[FULL_ERROR] = "1"  # Hydra then raises instead of printing and leaving
    try:
        register_schemas(config_name)
        require_readable(words, knows_options=not adds_search_path(argv))
        hydra.main(version_base="1.3", config_path=CONFIG_PACKAGE, config_name=config_name)(_closed(task))()
    except (*USER_MISTAKES, ValueError, PatchError, RunStoppedError) as error:
        if wants_traceback:
            raise
        print(f"error: {explain(error, config_name, words)}", file=sys.stderr)
        print("(HYDRA_FULL_ERROR=1 shows the traceback)", file=sys.stderr)
        return 1
    except OSError as error:
        if wants_traceback or (error.errno not in CANNOT_BE_WRITTEN and not isinstance(error, WRONG_PATHS)):
            raise
        print(f"error: {error} {CANNOT_BE_WRITTEN.get(error.errno or 0, '')}".rstrip(), file=sys.stderr)
        return 1
    finally:
        os.environ[FULL_ERROR] = "1" if wants_traceback else "0"
        show_what_ended()
    return 0


def refuse_flags(verb: str, argv: Sequence[str], flags: Sequence[str]) -> int:
    """Answer flags with dashes by the overrides that do the same; 2, as every program does for flags it lacks."""
    from embodix.cli.upstream_flags import TABLES, translate

    print(f"error: {verb} takes overrides without dashes, key=value; got {' '.join(flags)}.", file=sys.stderr)
    if verb in TABLES and any(flag.startswith("--") for flag in flags):
        overrides, refusals = translate(verb, argv)
        print("".join(f"{refusal}\n" for refusal in refusals), end="", file=sys.stderr)
        print(f"In its words: {shlex.join([*sys.argv[0].split(), *overrides])}", file=sys.stderr)
    return 2


def _closed(task: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
    """The task of a config whose keys are all known; Hydra composes it, and takes any key after a ``+``."""

    @functools.wraps(task)
    def run_checked(cfg: DictConfig) -> Any:
        hydra_cfg: Any = HydraConfig.get()
        try:
            require_known_keys(cfg, str(hydra_cfg.job.config_name))
            require_known_hydra_keys(hydra_cfg)
            return task(cfg)
        except Exception as error:
            if hydra_cfg.mode == RunMode.MULTIRUN:
                keep_failure(Path(hydra_cfg.runtime.output_dir), list(hydra_cfg.overrides.task), error)
            raise

    return run_checked


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


def explain(error: BaseException, config_name: str, words: Sequence[str]) -> str:
    """The error's own message, followed by what to do about each override that has no place."""
    message = _without_worker_trace(str(error).strip())
    cause = error.__cause__
    if cause is not None and str(cause).strip() not in message and isinstance(error, HydraException):
        message += f"\n{cause}"
    hints = hints_of(config_name, words) if isinstance(error, USER_MISTAKES) else []
    return "\n".join([message, *hints])


def _without_worker_trace(message: str) -> str:
    """What was said in a loader's worker process, of which torch makes a message with the whole traceback."""
    named = list(re.finditer(r"^[\w.]+Error: ", message, re.MULTILINE))
    return message[named[-1].end() :] if named and re.match(r"Caught \w+ in DataLoader worker", message) else message
