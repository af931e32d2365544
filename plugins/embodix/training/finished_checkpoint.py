# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's folder while it is written, and its rename when it is whole."""

from __future__ import annotations

import shutil
from pathlib import Path


def unfinished_folder(place: Path) -> Path:
    """Where the checkpoint of a place is written."""
    return place.with_name(f".{place.name}.unfinished")


def replace_folder(finished: Path, place: Path) -> None:
    """Rename; a checkpoint of the same step from an earlier try is moved aside first and removed last."""
    replaced = place.with_name(f".{place.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if place.exists():
        place.rename(replaced)
    finished.rename(place)
    shutil.rmtree(replaced, ignore_errors=True)
