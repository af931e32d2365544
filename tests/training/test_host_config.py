# SPDX-License-Identifier: Apache-2.0
"""The config groups mirror upstream's fields and defaults, and upstream's decoder has the last word."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import draccus
import pytest
from lerobot.configs.default import DatasetConfig, EvalConfig, WandBConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.policies.groot.configuration_groot import GrootConfig
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from omegaconf import OmegaConf

from embodix.config.compose import compose
from embodix.config.train_schema import EvalSettings, TrainSettings
from embodix.data.mixture_spec import host_dataset_fields
from embodix.training.host_config import (
    decode_host_config,
    fill_missing_preset,
    host_config_of_checkpoint,
    require_landed_groups,
)

OURS_ELSEWHERE = {  # upstream fields that are groups or set by the resume path
    *("dataset", "env", "policy", "optimizer", "scheduler", "eval", "wandb", "peft", "rename_map"),
    *("resume", "checkpoint_path", "use_policy_training_preset"),
}


def plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def test_train_settings_are_upstreams_fields_and_defaults() -> None:
    upstream = {f.name: f.default for f in dataclasses.fields(TrainPipelineConfig) if f.name not in OURS_ELSEWHERE}
    own = {"memory": None}  # what batch_size=auto is to fit in
    assert dataclasses.asdict(TrainSettings()) == {**upstream, **own}


def test_eval_settings_are_upstreams() -> None:
    assert dataclasses.asdict(EvalSettings()) == dataclasses.asdict(EvalConfig())


@pytest.mark.parametrize(("policy", "config"), [("pi05", PI05Config), ("groot_n15", GrootConfig)])
def test_policy_group_is_upstreams_config_field_by_field(policy: str, config: Any) -> None:
    group = OmegaConf.to_container(compose("train", [f"policy={policy}"]).policy)
    upstream = plain(draccus.encode(config(device="cpu")))
    changed = {"push_to_hub": False, "device": None}  # nothing leaves the machine unasked; the device is found
    assert group == {**upstream, **changed}


def test_dataset_group_is_upstreams_config() -> None:
    group: Any = OmegaConf.to_container(compose("train", ["dataset=lerobot", "dataset.repo_id=a/b"]).dataset)
    upstream = plain(draccus.encode(DatasetConfig(repo_id="a/b", video_backend="torchcodec")))
    upstream["image_transforms"].pop("tfs")  # upstream's default table of transforms stays upstream's
    assert host_dataset_fields(group) == upstream


def test_wandb_options_are_upstreams() -> None:
    options = OmegaConf.to_container(compose("train", ["logging=wandb"]).logging.options)
    assert options == {**dataclasses.asdict(WandBConfig()), "enable": True}


POLICIES = {"pi05": PI05Config, "pi05_small": PI05Config, "groot_n15": GrootConfig, "groot_n15_small": GrootConfig}


@pytest.mark.parametrize("policy", POLICIES)
def test_decoded_config_is_upstreams_type(policy: str) -> None:
    host_cfg = decode_host_config(compose("train", [f"policy={policy}", "train.output_dir=x", "train.steps=7"]))
    assert type(host_cfg) is TrainPipelineConfig
    assert isinstance(host_cfg.policy, POLICIES[policy])
    assert host_cfg.steps == 7
    assert host_cfg.use_policy_training_preset


def test_unknown_policy_field_names_the_nearest() -> None:
    cfg = compose("train", ["train.output_dir=x", "+policy.chunk_sise=10"])
    with pytest.raises(ValueError, match=r"(?s)chunk_sise.*Did you mean chunk_size"):
        decode_host_config(cfg)


def test_wrong_type_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_size"):
        decode_host_config(compose("train", ["train.output_dir=x", "policy.chunk_size=many"]))


def test_chosen_optimizer_takes_the_schedule_of_the_policy() -> None:
    host_cfg = decode_host_config(compose("train", ["train.output_dir=x", "optimizer=adamw", "optimizer.lr=0.5"]))
    fill_missing_preset(host_cfg)
    assert not host_cfg.use_policy_training_preset
    assert host_cfg.optimizer is not None
    assert host_cfg.optimizer.lr == 0.5
    assert host_cfg.scheduler == host_cfg.policy.get_scheduler_preset()


def test_a_group_that_did_not_land_is_an_error() -> None:
    with pytest.raises(ValueError, match="Group 'packing' must land as a mapping with a name"):
        require_landed_groups(compose("train", ["train.output_dir=x", "~packing"]))


def test_the_command_line_changes_a_checkpoints_config(tmp_path: Any) -> None:
    written = decode_host_config(compose("train", ["train.output_dir=x", "policy.device=cpu", "train.steps=3"]))
    written._save_pretrained(tmp_path)
    overrides = ["+plugin=embodix", "train.steps=6", "policy.optimizer_lr=0.25"]
    read = host_config_of_checkpoint(tmp_path / "train_config.json", overrides)
    assert (read.resume, read.steps, read.policy.optimizer_lr) == (True, 6, 0.25)


@pytest.mark.parametrize(
    "own",
    [
        "dataset.statistics=exact",
        "dataset.join={action: [arm, hand]}",
        "+dataset.join.action=[arm, hand]",
        "+dataset.members={arm: {repo_id: local}}",
        "+dataset.members.arm.weight=2",
        "dataset.evaluate_as=arm",
    ],
)
def test_fields_of_a_data_set_that_upstream_lacks_leave_a_checkpoints_config(tmp_path: Any, own: str) -> None:
    decode_host_config(compose("train", ["train.output_dir=x"]))._save_pretrained(tmp_path)
    read = host_config_of_checkpoint(tmp_path / "train_config.json", [own, "dataset.episodes=[0]"])
    assert read.dataset.episodes == [0]
