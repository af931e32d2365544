# SPDX-License-Identifier: Apache-2.0
"""A model folder made from another: written beside its place and renamed, so that an interrupted or failed command
leaves nothing half-made."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from embodix.data.embodiments import EMBODIMENTS_DIR


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


def copy_files(source: Path, folder: Path, left_out: Collection[str]) -> list[Path]:
    """Copy a model folder but for the files that are made anew: configs, processors, the members of a mixture.

    Args:
        source: a model folder.
        folder: that is written.
        left_out: names of files at the top.

    Returns:
        The folders of the members in it, whose files all are copied.
    """
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in left_out:
            shutil.copy2(path, folder / path.name)
    if (source / EMBODIMENTS_DIR).is_dir():
        shutil.copytree(source / EMBODIMENTS_DIR, folder / EMBODIMENTS_DIR, symlinks=True)
    return sorted((folder / EMBODIMENTS_DIR).glob("*/"))
