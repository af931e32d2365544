# SPDX-License-Identifier: Apache-2.0
"""A folder that is written beside its place and renamed: an interrupted or failed command leaves nothing half-made."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def finished_folder(output: Path) -> Iterator[Path]:
    """A folder to write into, which is renamed to ``output`` when the block ends without error, and removed else."""
    unfinished, replaced = (output.with_name(f".{output.name}.{state}") for state in ("unfinished", "replaced"))
    shutil.rmtree(unfinished, ignore_errors=True)  # of a command that was killed
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
    if output.exists():
        output.rename(replaced)
    unfinished.rename(output)
    shutil.rmtree(replaced, ignore_errors=True)
