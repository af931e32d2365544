# SPDX-License-Identifier: Apache-2.0
"""``lerobot quantize`` that fails while it writes the weights.

usage: failing_quantize.py killed|disk_full <words...>

killed: the process kills itself (SIGKILL) after half of the tensors.
disk_full: the kernel refuses any file to grow beyond 64 KiB (RLIMIT_FSIZE), as a full disk would.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

import torch

from embodix.cli.main import dispatch
from embodix.tensor_file import TensorFileWriter

FILE_LIMIT = 64 * 1024
write = TensorFileWriter.write


def kill_in_the_middle(self: TensorFileWriter, name: str, tensor: torch.Tensor) -> None:
    if 2 * len(self._tensor_digests) > len(self._specs):
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, name, tensor)


def fill_the_disk(self: TensorFileWriter, name: str, tensor: torch.Tensor) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails with an OSError
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, resource.RLIM_INFINITY))
    write(self, name, tensor)


if __name__ == "__main__":
    torch.set_num_threads(1)
    TensorFileWriter.write = {"killed": kill_in_the_middle, "disk_full": fill_the_disk}[sys.argv[1]]  # type: ignore[method-assign]
    sys.exit(dispatch("lerobot", ["quantize", *sys.argv[2:]]))
