# SPDX-License-Identifier: Apache-2.0
"""A training run that fails while it saves its second checkpoint.

usage: failing_run.py killed|disk_full <overrides...>

killed: the process kills itself (SIGKILL) in the middle of writing, after the weights and before the rest.
disk_full: from then on the kernel refuses any file to grow beyond 64 KiB (RLIMIT_FSIZE), as a full disk would.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Any

import torch
from lerobot.utils import train_utils

from embodix.testing.host_runs import train_here

SECOND_CHECKPOINT = 4
FILE_LIMIT = 64 * 1024
save_training_state = train_utils.save_training_state


def kill_in_the_middle(checkpoint_dir: Any, step: int, *args: Any) -> None:
    """Upstream calls this after the weights are written."""
    if step == SECOND_CHECKPOINT:
        os.kill(os.getpid(), signal.SIGKILL)
    save_training_state(checkpoint_dir, step, *args)


def fill_the_disk_afterwards(checkpoint_dir: Any, step: int, *args: Any) -> None:
    """After the first checkpoint, no file can grow beyond the limit."""
    save_training_state(checkpoint_dir, step, *args)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails with an OSError
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, resource.RLIM_INFINITY))


if __name__ == "__main__":
    torch.set_num_threads(1)
    train_utils.save_training_state = {"killed": kill_in_the_middle, "disk_full": fill_the_disk_afterwards}[sys.argv[1]]
    train_here(sys.argv[2:])
