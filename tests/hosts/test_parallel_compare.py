# SPDX-License-Identifier: Apache-2.0
"""``compare`` on two gloo ranks: upstream's own DDP, packed DDP and FSDP2 in turns, on one page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from embodix.report.steps import read_steps
from embodix_pi05.testing import small_run

pytestmark = pytest.mark.slow
NUM_STEPS = 4
VARIANTS = {
    "upstream_ddp": "['+plugin=none','parallel=ddp']",
    "ddp": "['+plugin=embodix','parallel=ddp']",
    "fsdp2": "['+plugin=embodix','parallel=fsdp2']",
}


@pytest.fixture(scope="module")
def compared(demonstrations: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a comparison, and what was printed."""
    folder = tmp_path_factory.mktemp("parallel") / "compare"
    chosen = [f"+compare.variants.{name}={overrides}" for name, overrides in VARIANTS.items()]
    chosen += [f"compare.only=[{','.join(VARIANTS)}]", "compare.measure_memory=false", "train.save_checkpoint=false"]
    run = small_run(demonstrations, f"train.steps={NUM_STEPS}", f"hydra.run.dir={folder}", *chosen)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*launcher, "-m", "embodix", "compare", *run],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, done.stdout


def parallel_of(folder: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((folder / "variants" / name / "manifest.json").read_text())["settings"]["parallel"])


def test_the_strategies_train_the_same(compared: tuple[Path, str]) -> None:
    folder, printed = compared
    losses = {
        name: [record.loss for record in read_steps(folder / "variants" / name / "steps.jsonl")] for name in VARIANTS
    }
    assert len(losses["fsdp2"]) == NUM_STEPS
    assert losses["fsdp2"] == pytest.approx(losses["ddp"], rel=1e-6)
    assert losses["ddp"][0] == pytest.approx(losses["upstream_ddp"][0], rel=1e-6)
    report = json.loads((folder / "report.json").read_text())
    assert {pair["name"]: pair["same_function"] for pair in report["pairs"]} == {"ddp": True, "fsdp2": True}
    assert printed.count("Report: ") == 1, "one rank reports"


def test_what_ranks_hold_and_exchange_is_read_back(compared: tuple[Path, str]) -> None:
    folder, _ = compared
    copies, shards = (parallel_of(folder, name) for name in ("ddp", "fsdp2"))
    total = copies["ranks"][0]["placed"]["total"]
    assert [rank["placed"]["replicated"] for rank in copies["ranks"]] == [total, total]
    assert all(rank["placed"]["optimizer"] > 0 for rank in copies["ranks"])
    for whole, part in zip(copies["ranks"], shards["ranks"], strict=True):
        assert part["placed"]["sharded"] < 0.6 * total
        assert part["placed"]["optimizer"] < 0.6 * whole["placed"]["optimizer"]
    moments = copies["ranks"][0]["placed"]["optimizer"]
    summed = copies["communication"]["all-reduce"]["num_bytes"]
    assert summed == pytest.approx(moments / 2, rel=0.02), "a gradient is half as large as Adam's two moments of it"
    assert set(shards["communication"]) >= {"all-gather", "reduce-scatter"}
    scattered = shards["communication"]["reduce-scatter"]["num_bytes"]
    assert scattered == pytest.approx(summed, rel=0.02), "the same gradients"
