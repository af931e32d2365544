# SPDX-License-Identifier: Apache-2.0
"""One thread for the tests of policies: their tensors are too small to share."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _one_thread():
    torch = sys.modules.get("torch")  # the scheduling core's tests import none
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
