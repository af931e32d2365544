# SPDX-License-Identifier: Apache-2.0
"""What a figure was measured with; refuses to label figures of uncommitted code."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("embodix", "torch", "transformers", "lerobot")
ROOT = Path(__file__).resolve().parents[1]


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def provenance(*, allow_dirty: bool) -> dict[str, Any]:
    """Commit, versions, machine and threads.

    Raises:
        SystemExit: uncommitted changes in code that counts, unless they are allowed; the record then says so.
    """
    dirty = _git("status", "--porcelain", "--", "plugins", "patches", "benchmarks/*.py")
    if dirty and not allow_dirty:
        raise SystemExit(
            "Figures belong to a commit, and these files are not committed:\n"
            f"{dirty}\nCommit them, or pass --allow-dirty, which marks the result."
        )
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(dirty),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
