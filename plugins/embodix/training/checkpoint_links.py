# SPDX-License-Identifier: Apache-2.0
"""Links among a run's checkpoints."""

from __future__ import annotations

import os
from pathlib import Path


def move_link(link: Path, target: Path) -> Path:
    """Let a link beside `target` point at it; at every moment the link is the old or the new one."""
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target.name)
    beside.replace(link)
    return link
