# SPDX-License-Identifier: Apache-2.0
"""`parallel=...` through upstream's own loop on two gloo ranks: same numbers, checkpoints that outlive the layout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from embodix.patching import patched
from embodix.report.steps import StepRecord, read_steps
from embodix_pi05.testing import SMALL_ARCHITECTURE, VOCAB_SIZE, small_run

pytestmark = pytest.mark.slow
NUM_STEPS = 4


def _launched(*overrides: str, num_ranks: int = 2, **environment: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    command = [*launcher, "-m", "embodix", "train", *overrides]
    own = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=own, check=False)


def _numbers(records: list[StepRecord]) -> dict[int, tuple[float, float]]:
    return {record.step: (record.loss, record.grad_norm) for record in records}


@pytest.fixture(scope="module")
def sharded_run(demonstrations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps under FSDP2, with checkpoints after two and four."""
    folder = tmp_path_factory.mktemp("sharded")
    options = [f"train.steps={NUM_STEPS}", "train.save_freq=2", "+plugin=embodix", "parallel=fsdp2"]
    places = [f"train.output_dir={folder}/run", f"hydra.run.dir={folder}/hydra"]
    done = _launched(*small_run(demonstrations, *options, *places))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "run"


def test_every_rank_says_what_it_holds(sharded_run: Path) -> None:
    parallel = json.loads((sharded_run / "manifest.json").read_text())["settings"]["parallel"]
    assert (parallel["name"], parallel["layout"]["shard"]) == ("fsdp2", 2)
    assert [(rank["rank"], rank["world"], rank["strategy"]) for rank in parallel["ranks"]] == [
        (0, 2, "FSDP2"),
        (1, 2, "FSDP2"),
    ]
    for rank in parallel["ranks"]:
        placed = rank["placed"]
        assert placed["replicated"] == 0 and placed["sharded"] <= 0.55 * placed["total"]


def test_copies_go_on_from_what_shards_have_saved(sharded_run: Path, tmp_path: Path) -> None:
    """The same losses and norms, step by step, as the run that was not interrupted."""
    run = shutil.copytree(sharded_run, tmp_path / "run", symlinks=True)
    shutil.rmtree(run / "checkpoints" / "000004")
    (run / "checkpoints" / "last").unlink()
    done = _launched(f"resume={run}/checkpoints/000002", "parallel=ddp")
    assert done.returncode == 0, done.stderr[-4000:]
    expected = _numbers(read_steps(sharded_run / "steps.jsonl"))
    found = _numbers(read_steps(run / "steps.jsonl"))
    for step in (3, 4):
        assert found[step] == pytest.approx(expected[step], rel=1e-6)
    ours, theirs = (
        load_file(folder / "checkpoints" / "last" / "pretrained_model" / "model.safetensors")
        for folder in (run, sharded_run)
    )
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-4


def test_plain_lerobot_loads_what_shards_have_saved(sharded_run: Path) -> None:
    from lerobot.policies.pi05.modeling_pi05 import PI05Policy

    folder = sharded_run / "checkpoints" / "last" / "pretrained_model"
    language = {**SMALL_ARCHITECTURE["language"], "vocab_size": VOCAB_SIZE}
    with patched({"lerobot_pi05_sizes": {"architecture": {**SMALL_ARCHITECTURE, "language": language}}}):
        policy = PI05Policy.from_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    loaded = policy.state_dict()
    assert [name for name in saved if not torch.equal(loaded[name], saved[name])] == []
