# SPDX-License-Identifier: Apache-2.0
"""A checkpoint trained with embodix runs in plain ``lerobot-eval`` where embodix is not installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embodix.simulation.rendering import select_gl_backend
from embodix.testing.host_runs import train_here
from embodix_pi05.testing import small_run

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("eval_small_pi05.py")


def test_plain_lerobot_eval_runs_an_embodix_checkpoint(
    demonstrations: Path,
    tmp_path: Path,
    new_environment: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = train_here(
        small_run(demonstrations, "train.steps=1", f"train.output_dir={tmp_path}/run", "+plugin=embodix")
    ).output_dir
    model = run / "checkpoints" / "last" / "pretrained_model"
    plain = new_environment("plain_lerobot")
    select_gl_backend()
    monkeypatch.setenv("HF_HUB_CACHE", str(demonstrations / "tokenizer" / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = plain.run(
        "python",
        SCRIPT,
        model / "embodix_architecture.json",
        f"--policy.path={model}",
        "--policy.device=cpu",
        "--policy.n_action_steps=6",
        "--env.type=metaworld",
        "--env.task=button-press-topdown-v3",
        '--rename_map={"observation.image": "observation.images.front"}',
        "--eval.n_episodes=1",
        "--eval.batch_size=1",
        f"--output_dir={tmp_path}/evaluation",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "WARNING: All image features are missing" not in done.stderr
    assert "Could not load" not in done.stdout + done.stderr
    results = json.loads((tmp_path / "evaluation" / "eval_info.json").read_text())
    assert results["overall"]["n_episodes"] == 1
