# SPDX-License-Identifier: Apache-2.0
"""One owner a folder: what a command writes into is locked while it runs, and all ranks of a run share one.

The lock is one of the operating system on a file beside the folder (``.run.lock`` beside ``run``), since upstream
refuses a folder that exists before its run; it is free as soon as its owner is gone, however that ended.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodix.launched_rank import is_first_rank

ORPHANS_S = 30.0  # a loader's workers hold the lock of a killed run until they notice that it is gone


@contextmanager
def owned_folder(folder: Path) -> Iterator[None]:
    """Own a folder for the duration of a block; ranks but the first only pass through.

    Raises:
        ValueError: another run owns it; the message names host, process, start and command.
    """
    if not is_first_rank():
        yield
        return
    path = _lock_path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(path, folder)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _lock_path(folder: Path) -> Path:
    resolved = folder.resolve()
    return resolved.with_name(f".{resolved.name}.lock")


def _lock(path: Path, folder: Path) -> int:
    """The descriptor that holds the lock of the file that is at ``path`` now."""
    gives_up_at = time.monotonic() + ORPHANS_S
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(lock)
            os.close(lock)
            if _is_running(owner) or time.monotonic() > gives_up_at:
                raise ValueError(_taken(folder, owner)) from None
            time.sleep(0.2)
            continue
        except OSError as error:
            logging.warning("%s can't be locked (%s): nothing keeps a second run out of %s.", path, error, folder)
            return lock
        if _is_at(lock, path):
            _write_owner(lock)
            return lock
        os.close(lock)  # an owner that has ended has taken the file away in between


def _is_at(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False


def _write_owner(lock: int) -> None:
    owner = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
    }
    os.ftruncate(lock, 0)
    os.pwrite(lock, (json.dumps(owner) + "\n").encode(), 0)


def _owner(lock: int) -> dict[str, Any]:
    """What the owner has written; nothing where it has only just taken the lock."""
    text = os.pread(lock, 1 << 16, 0)
    return dict(json.loads(text)) if text.endswith(b"\n") else {}


def _is_running(owner: dict[str, Any]) -> bool:
    if owner.get("host") != socket.gethostname():
        return True
    try:
        os.kill(int(owner["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _taken(folder: Path, owner: dict[str, Any]) -> str:
    who = (
        f"process {owner['pid']} on {owner['host']}, started {owner['started']}: {owner['command']}"
        if owner
        else "a process that has only just begun"
    )
    return (
        f"Another run writes into {folder} ({who}). Two would delete each other's checkpoints: wait for it, end it, or "
        "give this one a folder of its own (hydra.run.dir=..., train.output_dir=...)."
    )
