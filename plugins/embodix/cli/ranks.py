# SPDX-License-Identifier: Apache-2.0
"""One folder for all ranks of a run: each would resolve the time in Hydra's folder for itself."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import hydra
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from embodix.config.compose import CONFIG_MODULE, register_schemas
from embodix.launched_rank import is_first_rank

FOLDERS = ("run", "sweep")
# Of the ranks but the first, whatever handlers a command's own config names.
OTHERS_LOG = ("hydra/job_logging=stdout", "hydra.job_logging.root.handlers=[console]")
TIMEOUT = timedelta(minutes=5)


def with_first_ranks_folder(config_name: str, argv: list[str]) -> list[str]:
    """The command line with the folders that the first rank resolves; the others keep no log of their own in them.

    torchrun and what builds on it have a store that every rank can ask before there is a process group; a command that
    was not started by them is left as it is.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or int(os.environ["WORLD_SIZE"]) < 2:
        return argv
    from torch.distributed import TCPStore

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=TIMEOUT)
    key = f"embodix/{config_name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if is_first_rank():
        folders = resolved_folders(config_name, argv)
        store.set(key, json.dumps(folders))
        return _inserted(argv, folders)
    return _inserted(argv, [*json.loads(store.get(key)), *OTHERS_LOG])


def resolved_folders(config_name: str, argv: list[str]) -> list[str]:
    """Overrides that fix Hydra's folders where they are now; none for a command that does not compose."""
    overrides = [word for word in argv if "=" in word and not word.startswith("-")]
    register_schemas(config_name)
    try:
        with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            cfg = hydra.compose(config_name, overrides, return_hydra_config=True)
            # JSON's strings are strings in Hydra's override grammar too.
            return [f"hydra.{name}.dir={json.dumps(str(Path(cfg.hydra[name].dir).absolute()))}" for name in FOLDERS]
    except (HydraException, OmegaConfBaseException):
        return []  # the command says itself what is wrong with it


def _inserted(argv: list[str], overrides: list[str]) -> list[str]:
    """Before the command's own overrides, since Hydra takes no option between overrides."""
    first = next((place for place, word in enumerate(argv) if "=" in word and not word.startswith("-")), len(argv))
    return [*argv[:first], *overrides, *argv[first:]]
