# SPDX-License-Identifier: Apache-2.0
"""The peak memory of this process, for the manifest."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch


def peak_memory(device: torch.device) -> dict[str, Any]:
    """``peak_memory_bytes`` and ``peak_memory_source`` for a run manifest.

    On a GPU the allocator's peak, else the peak resident set. The latter is read from the address space
    (``VmHWM``), because ``getrusage`` hands a child the peak of the process that started it.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        return {"peak_memory_bytes": peak, "peak_memory_source": "CUDA allocator"}
    return {"peak_memory_bytes": peak_resident_bytes(), "peak_memory_source": "resident set of the process"}


def peak_resident_bytes() -> int:
    """The highest resident set of this process since it was started."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
