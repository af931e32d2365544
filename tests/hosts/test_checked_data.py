# SPDX-License-Identifier: Apache-2.0
"""Data through upstream's loop: refused before anything is loaded, joined, normalised by exact statistics."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from embodix.checkpoints.model_folder import find_model
from embodix.checkpoints.policy_loading import prepared_host
from embodix.checks.exact_statistics import exact_statistics_of
from embodix.patching import patched
from embodix.quantization.held_out import held_out_batches
from embodix.report.steps import read_steps
from embodix.schema.gate import AccuracyGateSettings
from embodix.testing.datasets import write_dataset
from embodix.testing.host_runs import train_here
from embodix_pi05.testing import small_run


@pytest.fixture
def run_on(demonstrations: Path, tmp_path: Path) -> Any:
    """Train on a data set, and return the losses."""

    def train(root: Path, *overrides: str) -> list[float]:
        output = tmp_path / "run"
        options = (f"train.output_dir={output}", f"tokenizer.directory={demonstrations}/tokenizer", *overrides)
        train_here(small_run(root, *options))
        return [record.loss for record in read_steps(output / "steps.jsonl")]

    return train


def _rewrite(root: Path, change: Any) -> None:
    """Change the columns of a data set of one file, and its features."""
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    columns = table.to_pydict()
    info = json.loads((root / "meta/info.json").read_text())
    stats = json.loads((root / "meta/stats.json").read_text())
    change(columns, info["features"], stats)
    pq.write_table(pa.table(columns), path)
    (root / "meta/info.json").write_text(json.dumps(info))
    (root / "meta/stats.json").write_text(json.dumps(stats))


def _split_action(columns: Any, features: Any, stats: Any) -> None:
    """The action as two keys: three numbers, and the last one by itself."""
    action = columns.pop("action")
    columns["action.arm"] = [row[:3] for row in action]
    columns["gripper"] = [row[3] for row in action]
    del features["action"]
    features["action.arm"] = {"dtype": "float32", "shape": [3], "names": ["x", "y", "z"]}
    features["gripper"] = {"dtype": "float32", "shape": [1], "names": ["gripper"]}
    own = stats.pop("action")
    stats["action.arm"] = {name: values[:3] if name != "count" else values for name, values in own.items()}
    stats["gripper"] = {name: values[3:] if name != "count" else values for name, values in own.items()}


@pytest.mark.parametrize("fast", [(), ("+plugin=embodix",)], ids=["upstream", "embodix"])
def test_an_action_of_several_keys_trains_as_the_whole_one(
    arm_dataset: Path, tmp_path: Path, run_on: Any, fast: Any
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    write_dataset(whole)
    shutil.copytree(whole, parts)
    _rewrite(parts, _split_action)
    expected = run_on(whole, *fast)
    with pytest.raises(ValueError, match=r"dataset\.join=\{action: \[action\.arm"):
        run_on(parts, *fast, f"train.output_dir={tmp_path / 'refused'}")
    shutil.rmtree(tmp_path / "run")
    assert run_on(parts, *fast, "dataset.join={action: [action.arm, gripper]}") == expected


def test_a_state_of_one_dimension_keeps_its_axis(tmp_path: Path, run_on: Any) -> None:
    """Upstream reads single numbers, whose batch of b has no axis of dimensions."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    root = write_dataset(tmp_path / "one", state_dim=1, action_dim=1)
    assert LeRobotDataset("a/b", root)[0]["observation.state"].shape == ()
    with patched({"lerobot_dataset_metadata": {}}):
        sample = LeRobotDataset("a/b", root, delta_timestamps={"action": [0.0, 0.1]})[0]
    assert sample["observation.state"].shape == (1,)
    assert sample["action"].shape == (2, 1)
    losses = run_on(root, "+plugin=embodix")
    assert np.isfinite(losses).all()
    assert max(losses) < 10


def _mode(columns: Any, features: Any, stats: Any) -> None:
    """A mode that is constant in each episode and differs between them, with upstream's mean of their quantiles."""
    last = [float(episode) for episode in columns["episode_index"]]
    columns["action"] = [[*row[:3], mode] for row, mode in zip(columns["action"], last, strict=True)]
    stats["action"]["q01"][3] = stats["action"]["q99"][3] = float(np.mean(last))
    for name, value in (("mean", np.mean(last)), ("std", np.std(last)), ("min", min(last)), ("max", max(last))):
        stats["action"][name][3] = float(value)


def test_a_mode_is_refused_and_trains_by_exact_statistics(tmp_path: Path, run_on: Any) -> None:
    root = write_dataset(tmp_path / "mode")
    _rewrite(root, _mode)
    with pytest.raises(ValueError, match=r"dimension 3\) \[normalised_large\].*dataset.statistics=exact"):
        run_on(root)
    assert not (tmp_path / "run").exists()
    ruined = run_on(root, "check=warn")
    assert max(ruined) > 1e6
    shutil.rmtree(tmp_path / "run")
    assert max(run_on(root, "dataset.statistics=exact")) < 10


def test_exact_statistics_are_in_the_checkpoint(tmp_path: Path, run_on: Any) -> None:
    root = write_dataset(tmp_path / "set")
    run_on(root, "dataset.statistics=exact", "train.save_freq=3", "train.save_checkpoint=true")
    (file,) = (tmp_path / "run/checkpoints/000003/pretrained_model").glob("policy_preprocessor*normalizer*.safetensors")
    values = np.stack(pq.read_table(root / "data/chunk-000/file-000.parquet").column("action").to_pylist())
    kept = load_file(file)
    np.testing.assert_allclose(kept["action.q01"], np.quantile(values, 0.01, axis=0), rtol=1e-5)
    np.testing.assert_allclose(kept["action.q99"], np.quantile(values, 0.99, axis=0), rtol=1e-5)


def test_a_policy_that_does_not_normalise_images_runs_without_their_statistics(tmp_path: Path, run_on: Any) -> None:
    root = write_dataset(tmp_path / "set")
    path = root / "meta/stats.json"
    stats = json.loads(path.read_text())
    path.write_text(json.dumps({key: stats[key] for key in ("observation.state", "action")}))
    assert np.isfinite(run_on(root)).all()


def test_missing_statistics_are_made_by_exact(tmp_path: Path, run_on: Any) -> None:
    root = write_dataset(tmp_path / "set")
    (root / "meta/stats.json").unlink()
    with pytest.raises(ValueError, match="upstream would train it unnormalised"):
        run_on(root)
    assert max(run_on(root, "dataset.statistics=exact")) < 10


def test_flat_dimensions_stay_bounded(tmp_path: Path) -> None:
    """Constant, constant but for one frame, constant up to rounding: what is normalised is about 1 at most."""
    root = write_dataset(tmp_path / "flat", episode_length=60)

    def flat(columns: Any, features: Any, stats: Any) -> None:
        rows = len(columns["action"])
        third = [3.0 + 1e-7 * (row % 2) for row in range(rows)]
        columns["action"] = [[5.0, float(row == 7), third[row], old[3]] for row, old in enumerate(columns["action"])]

    _rewrite(root, flat)
    stats = exact_statistics_of(root, None, {}, {})["action"]
    values = np.stack(pq.read_table(root / "data/chunk-000/file-000.parquet").column("action").to_pylist())
    scaled = 2 * (values - stats["q01"]) / (stats["q99"] - stats["q01"]) - 1
    assert np.abs(scaled).max() < 3
    assert np.abs((values - stats["mean"]) / (stats["std"] + 1e-8)).max() < 20


@pytest.mark.parametrize("joined", [("dataset.join={action: [action.arm, gripper]}",), ()], ids=["parts", "single"])
def test_the_gate_reads_what_training_read(tmp_path: Path, run_on: Any, joined: tuple[str, ...]) -> None:
    width = 4 if joined else 1
    root = write_dataset(tmp_path / "set", state_dim=width, action_dim=width)
    if joined:
        _rewrite(root, _split_action)
    run_on(root, "train.steps=1", "train.save_freq=1", "train.save_checkpoint=true", *joined)
    source = find_model(tmp_path / "run")
    cfg = source.compose_run(source.policy_type(), [])
    with prepared_host(source, cfg):
        samples = held_out_batches(source, cfg, AccuracyGateSettings(num_samples=2, batch_size=2))
    assert len(samples.action_names) == width
    assert samples[0]["action"].shape[-1] == samples[0]["observation.state"].shape[-1] == width
