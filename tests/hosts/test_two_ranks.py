# SPDX-License-Identifier: Apache-2.0
"""Two gloo ranks on the CPU: the same losses as upstream's own DDP run, masked losses normalised over both ranks."""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embodix.report.steps import read_steps
from embodix.testing.errors import compare_gradients, gradients_of
from embodix_pi05.testing import small_pi05, small_run, upstream_losses

pytestmark = pytest.mark.slow
SCRIPT, FP8_SCRIPT = (Path(__file__).with_name(name) for name in ("run_two_ranks.py", "fp8_two_ranks.py"))
NUM_STEPS = 4


def _torchrun(*command: str, mixed_precision: str = "no") -> None:
    done = _launched(*command, mixed_precision=mixed_precision)
    assert done.returncode == 0, done.stderr[-4000:]


def _launched(*command: str, mixed_precision: str = "no") -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HYDRA_FULL_ERROR": "1",
        "ACCELERATE_MIXED_PRECISION": mixed_precision,
    }
    return subprocess.run([*launcher, *command], capture_output=True, text=True, timeout=400, env=environment)


def _overrides(root: Path, folder: Path, *more: str) -> list[str]:
    return small_run(root, f"train.steps={NUM_STEPS}", f"train.output_dir={folder}/run", *more)


@pytest.fixture(scope="module")
def two_ranks(demonstrations: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks computed in upstream's own DDP run and in a masked step."""
    folder = tmp_path_factory.mktemp("two_ranks")
    _torchrun(str(SCRIPT), str(folder), *_overrides(demonstrations, folder))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_two_ranks", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("plugin", ["none", "embodix"])
def test_losses_are_those_of_upstreams_own_ddp_run(
    demonstrations: Path, tmp_path: Path, two_ranks: list[dict[str, Any]], plugin: str
) -> None:
    overrides = _overrides(demonstrations, tmp_path, f"+plugin={plugin}", f"hydra.run.dir={tmp_path}/hydra")
    _torchrun("-m", "embodix", "train", *overrides)
    records = read_steps(tmp_path / "run" / "steps.jsonl")
    assert two_ranks[0]["upstream"] != two_ranks[1]["upstream"]
    upstream = [statistics.fmean(losses) for losses in zip(*(rank["upstream"] for rank in two_ranks), strict=True)]
    assert [record.num_samples for record in records] == [6] * NUM_STEPS
    losses = [record.loss for record in records]
    if plugin == "none":
        assert losses == upstream
        assert records[0].tokens is None
    else:
        counts = [record.tokens for record in records if record.tokens is not None]
        assert [count.images_upstream for count in counts] == [18] * NUM_STEPS  # three slots, samples of both ranks
        assert losses[0] == pytest.approx(upstream[0], rel=1e-6)
        assert losses == pytest.approx(upstream, rel=1e-5)


def test_a_broken_sample_of_one_rank_ends_both(demonstrations: Path, tmp_path: Path) -> None:
    """Before the optimizer, at the same step, with the samples of both."""
    broken = shutil.copytree(demonstrations, tmp_path / "broken")
    data = next((broken / "data").rglob("*.parquet"))
    table = pq.read_table(data)
    column = table.column_names.index("action")
    actions = table.column(column).to_pylist()
    actions[0][0] = float("inf")
    field = table.schema.field(column)
    pq.write_table(table.set_column(column, field, pa.array(actions, type=field.type)), data)
    chosen = ["dataset.episodes=[0]", "train.batch_size=15", "train.save_freq=1", "check=off"]
    chosen += [f"hydra.run.dir={tmp_path}/hydra"]
    done = _launched("-m", "embodix", "train", *_overrides(broken, tmp_path, *chosen))
    assert done.returncode == 1
    assert "episode 0 frame 0" in done.stderr and "not finite: action" in done.stderr
    assert "process 0: episode 0" in done.stderr and "process 1: episode 0" in done.stderr
    assert done.stderr.count("NonFiniteError: Step ") == 2, "each rank says it"
    records = tmp_path / "run" / "steps.jsonl"
    num_trained = len(read_steps(records)) if records.is_file() else 0
    assert f"Step {num_trained + 1} has a loss of" in done.stderr
    assert len(list((tmp_path / "run").glob("checkpoints/0*"))) == num_trained


def test_the_first_ranks_timings_decide_what_both_compute_in_fp8(tmp_path: Path) -> None:
    _torchrun(str(FP8_SCRIPT), str(tmp_path))
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    first, second = ([m["path"] for m in rank["described"]["converted"]] for rank in ranks)
    assert first == second
    assert {path.rpartition(".")[2] for path in first} == {"k_proj", "v_proj"}
    gradients, others = (rank["gradients"] for rank in ranks)
    assert all(g is others[name] is None or torch.equal(g, others[name]) for name, g in gradients.items())


def test_two_ranks_train_in_fp8_under_bfloat16_autocast(demonstrations: Path, tmp_path: Path) -> None:
    """The products' inputs are in bfloat16, their weights and what the optimizer changes in float32."""
    records = {}
    for precision in ("none", "fp8"):
        folder = tmp_path / precision
        options = ["+plugin=embodix", f"precision={precision}", f"hydra.run.dir={folder}/hydra"]
        _torchrun("-m", "embodix", "train", *_overrides(demonstrations, folder, *options), mixed_precision="bf16")
        records[precision] = [record.loss for record in read_steps(folder / "run" / "steps.jsonl")]
    assert records["fp8"] != records["none"]
    assert records["fp8"][0] == pytest.approx(records["none"][0], rel=3e-2)
    assert records["fp8"] == pytest.approx(records["none"], rel=6e-2)  # after steps of other weights


def test_masked_loss_is_normalised_by_the_count_of_both_ranks(
    two_ranks: list[dict[str, Any]], script: ModuleType
) -> None:
    """Reference: upstream's unreduced losses of both batches in one process, over the number of valid elements."""
    policy = small_pi05()
    action_dim = policy.config.output_features["action"].shape[0]
    total, count = torch.zeros(()), 0
    for rank in (0, 1):
        batch = script.masked_batch(policy, rank)
        torch.manual_seed(100 + rank)
        valid = ~batch["action_is_pad"]
        total = total + upstream_losses(policy, batch)[..., :action_dim][valid].sum()
        count += int(valid.sum()) * action_dim
    loss = total / count
    loss.backward()

    masked = [ranks["masked"] for ranks in two_ranks]
    assert sum(result["loss"] for result in masked) / 2 == pytest.approx(loss.item(), rel=1e-6)
    wanted = gradients_of(policy)
    for result in masked:
        got = result["gradients"]  # DDP gives zeros to parameters that no rank used
        unused = [got[name] for name in wanted if wanted[name] is None and got[name] is not None]
        assert not any(gradient.any() for gradient in unused)
        used = [name for name, gradient in wanted.items() if gradient is not None]
        comparison = compare_gradients({name: got[name] for name in used}, {name: wanted[name] for name in used})
        assert comparison.worst <= 1e-5, comparison
