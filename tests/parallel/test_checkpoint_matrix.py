# SPDX-License-Identifier: Apache-2.0
"""What one strategy has saved every other goes on from, to the next step of a training that was not interrupted."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow
RANK = Path(__file__).with_name("matrix_rank.py")
NAMES = ("auto", "fsdp2", "tensor", "pipeline")
ZERO = ("zero2", "zero3") if importlib.util.find_spec("deepspeed") else ()
WITHOUT_GRADIENT = "k_proj.bias"  # zero in exact arithmetic: Adam steps along rounding


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("matrix")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [*launcher, str(RANK), str(folder), *NAMES, *ZERO]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(torch.load(folder / "matrix.pt", weights_only=False))


def _weights_differ(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    named = [name for name in expected if not name.endswith(WITHOUT_GRADIENT)]
    assert len(named) > 100
    return max(float((found[n] - expected[n]).norm() / expected[n].norm().clamp(min=1e-6)) for n in named)


def test_all_strategies_train_alike(matrix: dict[str, Any]) -> None:
    reference = matrix["uninterrupted"]["auto"]
    assert len(matrix["uninterrupted"]) == len(NAMES) + len(ZERO)
    for name, done in matrix["uninterrupted"].items():
        for (loss, norm), (expected_loss, expected_norm) in zip(
            [*done["first"], done["last"]], [*reference["first"], reference["last"]], strict=True
        ):
            assert loss == pytest.approx(expected_loss, rel=1e-6), name
            assert norm == pytest.approx(expected_norm, rel=1e-5), name
        assert _weights_differ(done["weights"], reference["weights"]) < 1e-4, name


def test_every_strategy_goes_on_from_every_other(matrix: dict[str, Any]) -> None:
    num_strategies = len(NAMES) + len(ZERO)
    assert len(matrix["pairs"]) == num_strategies**2
    for (before, after), done in matrix["pairs"].items():
        expected = matrix["uninterrupted"][before]
        assert done["last"][0] == pytest.approx(expected["last"][0], rel=1e-6), (before, after)
        assert done["last"][1] == pytest.approx(expected["last"][1], rel=1e-5), (before, after)
        assert _weights_differ(done["weights"], expected["weights"]) < 1e-4, (before, after)


def test_a_lost_optimizer_state_is_seen(matrix: dict[str, Any]) -> None:
    """The mutation twin: without the optimizer's state the weights after the step are others."""
    expected = matrix["uninterrupted"]["auto"]
    assert matrix["forgotten"]["last"] == pytest.approx(expected["last"], rel=1e-5)  # the weights are those saved
    assert _weights_differ(matrix["forgotten"]["weights"], expected["weights"]) > 1e-3
