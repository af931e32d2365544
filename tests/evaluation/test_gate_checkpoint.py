# SPDX-License-Identifier: Apache-2.0
"""The accuracy gate on checkpoints of real runs: their own data set, preprocessed as training preprocesses it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.datasets.factory import make_dataset
from lerobot.policies.factory import make_pre_post_processors
from torch.utils.data import default_collate

from embodix.checkpoints.model_folder import find_model
from embodix.checkpoints.policy_loading import prepared_host
from embodix.config.compose import compose
from embodix.quantization.accuracy_gate import gate_checkpoint, gated_checkpoint
from embodix.quantization.held_out import held_out_batches
from embodix.schema.gate import AccuracyGateSettings
from embodix.testing.host_runs import train_here
from embodix.training.host_config import decode_host_config
from embodix_fp8.fp8_block import Fp8BlockQuantizer
from embodix_groot.testing import small_groot_run
from embodix_pi05.testing import small_run

pytestmark = pytest.mark.slow
SETTINGS = AccuracyGateSettings(num_samples=6, batch_size=4)
MAKERS = {"pi05": small_run, "groot": small_groot_run}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=list(MAKERS))
def run(request, demonstrations: Path, tmp_path_factory):
    """A run on two of four episodes: its overrides and its folder."""
    folder = tmp_path_factory.mktemp("gated") / "run"
    options = ["train.steps=2", f"train.output_dir={folder}", "+plugin=embodix", "+dataset.episodes=[0,2]"]
    overrides = MAKERS[request.param](demonstrations, *options)
    return overrides, train_here(overrides).output_dir


@pytest.fixture(scope="module")
def source(run):
    return find_model(run[1])


@pytest.fixture(scope="module")
def cfg(source):
    return source.compose_run(source.policy_type(), [])


def test_samples_are_left_out_episodes_as_training_preprocesses_them(run, source, cfg):
    with prepared_host(source, cfg):
        samples = held_out_batches(source, cfg, SETTINGS)
        assert sorted(set(samples.episodes)) == [1, 3] and len(samples) == 2
        assert "2 episodes that training left out" in samples.description
        assert len(samples.action_names) == 4
        host_cfg = decode_host_config(compose("train", [*run[0], "dataset.episodes=null"]))
        dataset = make_dataset(host_cfg)
        # Made anew from what training's loop makes it of: the policy's config and the data set's statistics.
        config = PreTrainedConfig.from_pretrained(source.model)
        preprocess, _ = make_pre_post_processors(config, dataset_stats=dataset.meta.stats)
        starts = dataset.meta.episodes["dataset_from_index"]
        ends = dataset.meta.episodes["dataset_to_index"]
        rows = [starts[e] + (2 * k + 1) * (ends[e] - starts[e]) // 6 for e in (1, 3) for k in range(3)]
        wanted = preprocess(default_collate([dataset[row] for row in rows[:4]]))
    tensors = {key: value for key, value in wanted.items() if isinstance(value, torch.Tensor)}
    assert len(tensors) > 6
    for key, value in tensors.items():
        assert torch.equal(samples[0][key], value), key


def test_a_checkpoint_passes_and_another_recording_stands_in(run, source, cfg, tmp_path):
    settings = AccuracyGateSettings(num_samples=6, batch_size=4, thresholds={"loss_change": 0.5})
    result = gate_checkpoint(source, cfg, Fp8BlockQuantizer(activations="high"), settings)
    assert result.passed, result.failures
    assert result.num_episodes == 2
    units = [dimension.unit for dimension in result.comparison.chunk.dimensions]
    assert all(0 < unit <= 1.01 for unit in units)  # MetaWorld's actions are in [-1, 1]
    missing = AccuracyGateSettings(dataset_root=str(tmp_path / "nowhere"))
    with (
        pytest.raises(ValueError, match=r"there is none at .*nowhere\. Give its folder: gate\.dataset_root"),
        gated_checkpoint(source, cfg, missing),
    ):
        pass
