# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed as this process needs it: chosen for its device, without what it would compile first."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

_ACCELERATOR = "DS_ACCELERATOR"


def why_missing() -> str | None:
    """Why DeepSpeed can't be used here, None where it can; nothing is imported."""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed; pip install 'embodix[deepspeed]' brings it"
    return None


def load_deepspeed(device: torch.device) -> Any:
    """DeepSpeed's module, working on the run's device and beside the process group that there is.

    Raises:
        ValueError: it was loaded, or told to load, for another device.
    """
    wanted = device.type
    chosen = os.environ.setdefault(_ACCELERATOR, wanted)
    import deepspeed

    found = deepspeed.accelerator.get_accelerator().device_name()
    if found != wanted:
        raise ValueError(
            f"DeepSpeed works on one device of a process, the policy's; it has {found} ({_ACCELERATOR}={chosen}) and "
            f"policy.device is {wanted}. Unset {_ACCELERATOR}, or set it to {wanted}."
        )
    # An exchange through shared memory, for inference alone: compiled at first use, for a minute, with a lock that a
    # killed process leaves to all later ones.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)
    return deepspeed
