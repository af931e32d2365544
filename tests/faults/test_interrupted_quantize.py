# SPDX-License-Identifier: Apache-2.0
"""A quantization that dies while it writes leaves nothing half-made, and keeps what was there before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

from embodix.cli.main import dispatch
from embodix_fp8.file_format import BlockScaledWeights
from embodix_pi05.testing import SMALL_ARCHITECTURE, small_pi05

FAILING = Path(__file__).with_name("failing_quantize.py")
Quantize = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained policy's folder."""
    folder = tmp_path_factory.mktemp("model")
    policy = small_pi05()
    policy.config._save_pretrained(folder)
    (folder / "embodix_architecture.json").write_text(json.dumps(SMALL_ARCHITECTURE))
    save_file({name: tensor.clone() for name, tensor in policy.state_dict().items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def failing(model: Path, tmp_path: Path) -> Quantize:
    """The command with a fault, writing to ``out``."""

    def run(fault: str, *overrides: str) -> subprocess.CompletedProcess[str]:
        words = [str(model), str(tmp_path / "out"), f"hydra.run.dir={tmp_path / 'run'}", *overrides]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(FAILING), fault, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)

    return run


def _quantize(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lerobot"])
    return dispatch(
        "lerobot", ["quantize", str(model), str(tmp_path / "out"), f"hydra.run.dir={tmp_path / 'run'}", *overrides]
    )


def _require_readable(folder: Path) -> None:
    with BlockScaledWeights(folder) as weights:
        assert len(weights.stored()) == 21


@pytest.mark.slow
def test_killed_while_writing(failing: Quantize, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert failing("killed").returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir() if path.name != "run"] == [".out.unfinished"]
    assert (tmp_path / ".out.unfinished" / "model.safetensors").is_file()  # it died in the middle of the weights
    assert _quantize(model, tmp_path, monkeypatch) == 0
    _require_readable(tmp_path / "out")
    assert not (tmp_path / ".out.unfinished").exists()


@pytest.mark.slow
def test_a_full_disk_keeps_the_folder_that_was_to_be_replaced(
    failing: Quantize, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _quantize(model, tmp_path, monkeypatch) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    done = failing("disk_full", "overwrite=true", "unused_heads=drop")
    assert done.returncode == 1
    assert "out could not be written: [Errno 27] File too large. Nothing of it was left; it takes " in done.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    assert _quantize(model, tmp_path, monkeypatch, "overwrite=true", "unused_heads=drop") == 0
    _require_readable(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < len(before["model.safetensors"])
