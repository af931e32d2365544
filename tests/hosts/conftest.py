# SPDX-License-Identifier: Apache-2.0
"""Runs through upstream's training loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Results are compared bit by bit: the order of additions must not depend on the machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def weights_of() -> Callable[[Path], dict[str, torch.Tensor]]:
    """The weights in the last checkpoint of a run folder."""

    def weights(run: Path) -> dict[str, torch.Tensor]:
        found = load_file(run / "checkpoints" / "last" / "pretrained_model" / "model.safetensors")
        assert len(found) > 50  # what is compared over all weights must compare some
        return found

    return weights
