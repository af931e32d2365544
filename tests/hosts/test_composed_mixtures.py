# SPDX-License-Identifier: Apache-2.0
"""Composed batches of several embodiments, of GR00T, and over two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from embodix.packing.batches import StreamPosition
from embodix.report.steps import StepRecord, read_steps
from embodix.testing.datasets import write_dataset
from embodix.testing.host_runs import train_here
from embodix.training.composition import Composition
from embodix.training.session import current_session
from embodix_groot.testing import small_groot_run
from embodix_pi05.testing import small_run

MEMBERS = (
    "dataset.members={{arm: {{repo_id: embodix/arm, root: {arm}, cameras: {{front: base, wrist: wrist}}}},"
    " hands: {{repo_id: embodix/hands, root: {hands}, cameras: {{left: base, right: left_wrist, top: wrist}}}}}}"
)
COMPOSED = ["+plugin=embodix", "packing=token_budget", "packing.options.bins_per_step=2", "train.batch_size=6"]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, demonstrations: Path) -> Callable[..., list[str]]:
    """Overrides of a run on an arm with two cameras and on two arms with three."""
    folder = tmp_path_factory.mktemp("members")
    arm = write_dataset(folder / "arm", state_dim=7, action_dim=7)
    cameras, tasks = ("top", "left", "right"), ("fold the towel with both hands",)
    hands = write_dataset(folder / "hands", cameras=cameras, state_dim=14, action_dim=14, tasks=tasks, fps=30, seed=1)

    def overrides(*options: str, policy: Callable[..., list[str]] = small_run) -> list[str]:
        own = [option for option in policy(demonstrations) if not option.startswith("dataset.root")]
        sizes = ["policy.max_action_dim=16", "policy.max_state_dim=16"]
        if policy is small_run:
            sizes.append("policy.tokenizer_max_length=96")
        data = ["dataset=mixture", MEMBERS.format(arm=arm, hands=hands)]
        return [*own, *data, *sizes, f"tokenizer.directory={demonstrations}/tokenizer", *COMPOSED, *options]

    return overrides


def composition() -> Composition:
    """Of the run that was trained last."""
    found = current_session().composition
    assert found is not None
    return found


def assert_measured_is_trained(records: list[StepRecord]) -> None:
    """The tokens and images of every step are those that its samples were measured to have."""
    stream, sizes = composition().stream, composition().sizes
    stream.position = StreamPosition()
    assert len(records) >= 3
    for record in records:
        samples = np.concatenate([samples for bins in next(stream).ranks for samples in bins])
        assert record.tokens is not None
        assert record.num_samples == samples.size
        assert record.tokens.valid == sizes.tokens[samples].sum()
        assert record.tokens.images_computed == sizes.images_N[samples].sum()


@pytest.mark.parametrize("policy", [small_run, small_groot_run], ids=["pi05", "groot"])
def test_embodiments_share_composed_batches(
    mixture: Callable[..., list[str]], tmp_path: Path, policy: Callable[..., list[str]]
) -> None:
    options = ("train.steps=4", f"train.output_dir={tmp_path}/run", "train.save_checkpoint=false")
    records = train_here(mixture(*options, policy=policy)).records
    assert len(set(composition().sizes.images_N)) == 2
    assert_measured_is_trained(records)
    assert all(np.isfinite(record.loss) for record in records)


def test_groot_trains_on_composed_batches(demonstrations: Path, tmp_path: Path) -> None:
    options = ["train.steps=3", f"train.output_dir={tmp_path}/run", "train.save_checkpoint=false"]
    records = train_here(small_groot_run(demonstrations, *COMPOSED, *options)).records
    assert len(set(composition().sizes.prefix_N)) == 2, "one length a task"
    assert_measured_is_trained(records)


def test_groot_refuses_fixed_shapes(demonstrations: Path, tmp_path: Path) -> None:
    options = ["+plugin=embodix", "packing=sequence_length", f"train.output_dir={tmp_path}/run"]
    with pytest.raises(ValueError, match=r"valid rows, not fixed shapes.*Choose packing=token_budget"):
        train_here(small_groot_run(demonstrations, *options))


def test_sequence_length_trains_in_few_shapes(demonstrations: Path, tmp_path: Path) -> None:
    options = ["+plugin=embodix", "packing=sequence_length", "packing.options.num_shapes=2", "train.steps=4"]
    records = train_here(small_run(demonstrations, *options, f"train.output_dir={tmp_path}/run")).records
    computed = {record.tokens.computed for record in records if record.tokens is not None}
    assert len(computed) <= 2
    assert all(record.tokens is not None and record.tokens.computed >= record.tokens.valid for record in records)


@pytest.mark.slow
def test_two_processes_and_then_one(demonstrations: Path, tmp_path: Path) -> None:
    """Both share every step; one process alone continues where the two stopped."""
    run = tmp_path / "run"
    options = [*COMPOSED, "train.steps=3", f"train.output_dir={run}", f"hydra.run.dir={tmp_path}/hydra"]
    options += ["packing.options.cost=fit", "packing.options.fit_steps=1"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "embodix"]
    command = [*launcher, "train", *small_run(demonstrations, *options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HYDRA_FULL_ERROR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    state = json.loads((run / "checkpoints/last/training_state/embodix_stream.json").read_text())
    assert state["stream"]["position"]["num_bins"] == 3 * 2 * 2
    tokens, fitted = state["stream"]["cost_models"]
    assert tokens["model"]["tokens"] == 1.0
    assert (fitted["first_bin"], fitted["first_epoch"]) == (3 * 2 * 2, 1), "fitted to the third step of both processes"
    records = train_here([f"resume={run}", "train.steps=5", "schedule.on_resume=keep"]).records
    assert len(composition().stream.cost_models) == 2, "a fitted model is kept, not fitted again"
    assert [record.step for record in records] == [4, 5]
    both = read_steps(run / "steps.jsonl")
    assert [record.num_samples for record in both[:3]] == pytest.approx([12] * 3, abs=2)
    end = composition().stream.state_dict(composition().loader.step.end)  # type: ignore[union-attr]  # it trained
    assert end["position"]["num_bins"] == 3 * 2 * 2 + 2 * 2
    assert end["position"]["num_samples"] == sum(record.num_samples for record in both)
    stream = composition().stream
    stream.position = StreamPosition()
    valid = 0
    while stream.position.num_bins < 3 * 2 * 2:
        valid += sum(int(composition().sizes.tokens[s].sum()) for bins in next(stream).ranks for s in bins)
    assert sum(record.tokens.valid for record in both[:3] if record.tokens is not None) == valid
