# SPDX-License-Identifier: Apache-2.0
"""One thread for the parity tests: their tensors are too small to share."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # ddp_case, which the rank's script imports too


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
