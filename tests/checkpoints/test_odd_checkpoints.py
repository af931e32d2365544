# SPDX-License-Identifier: Apache-2.0
"""A checkpoint whose files are missing, damaged or of another robot is refused by what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors
from safetensors.torch import load_file, save_file

from embodix.checkpoints.env_features import require_provided
from embodix.checkpoints.model_folder import find_model
from embodix.checkpoints.policy_loading import policy_config
from embodix.checkpoints.processor_files import load_processors, require_whole_processors
from embodix.data.tokenizer import build_tokenizer, offline_tokenizer
from embodix.training.host_config import decode_env

PRE, POST = "policy_preprocessor.json", "policy_postprocessor.json"
NORMALIZER = "policy_preprocessor_step_3_normalizer_processor.safetensors"
UNNORMALIZER = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
CAMERA, STATE = "observation.images.front", "observation.state"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("odd") / "tokenizer"
    build_tokenizer(["push it"], folder, 1024)
    with offline_tokenizer(folder):
        yield folder


@pytest.fixture
def model(hub: Path, tmp_path: Path) -> Path:
    """A model folder without weights; its images have no statistics, which π0.5 does not need."""
    config = PI05Config(device="cpu", chunk_size=6, n_action_steps=3)
    config.input_features = {
        CAMERA: PolicyFeature(FeatureType.VISUAL, (3, 28, 28)),
        STATE: PolicyFeature(FeatureType.STATE, (4,)),
    }
    config.output_features = {"action": PolicyFeature(FeatureType.ACTION, (4,))}
    stats = {key: {"q01": torch.zeros(4), "q99": torch.ones(4)} for key in (STATE, "action")}
    for processor in make_pi05_pre_post_processors(config, stats):
        processor.save_pretrained(tmp_path)
    config._save_pretrained(tmp_path)
    return tmp_path


def load(model: Path) -> Any:
    source = find_model(model)
    return load_processors(policy_config(source, {}), source.model)


def test_a_whole_checkpoint_loads_without_statistics_of_images(model: Path) -> None:
    pre, post = load(model)
    assert CAMERA not in pre.steps[3].stats
    assert len(pre.steps) > len(post.steps) > 0


def without(*prefixes: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {name: value for name, value in tensors.items() if not name.startswith(prefixes)}


def of_other_robot(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.arange(7.0) if name.startswith(STATE) else value for name, value in tensors.items()}


def with_nan(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {f"{STATE}.q99": torch.tensor([1.0, float("nan"), 1.0, 1.0])}


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (NORMALIZER, without(f"{STATE}.q01"), rf"{STATE} lacks q01, which it is normalised with \(QUANTILES\)"),
        (NORMALIZER, without(STATE), rf"{STATE} lacks q01 and q99"),
        (UNNORMALIZER, without("action"), r"action lacks q01 and q99"),
        (NORMALIZER, of_other_robot, rf"q01 of {STATE} has 7 values for 4 dimensions; q99 of"),
        (NORMALIZER, with_nan, rf"q99 of {STATE} is not finite"),
    ],
)
def test_statistics_that_the_policy_needs(model: Path, file: str, change: Any, message: str) -> None:
    save_file(change(load_file(model / file)), model / file)
    with pytest.raises(ValueError, match=rf"statistics of the checkpoint .*{message}"):
        load(model)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (PRE, None, f"{PRE}, which is missing"),
        (POST, None, f"{POST}, which is missing"),
        (PRE, b"{", r"is not the JSON of a processor \(JSONDecodeError"),
        (POST, b"[]", r"is not the JSON of a processor \(TypeError"),
        (NORMALIZER, None, f"statistics of normalizer_processor are in .*{NORMALIZER}, which is missing"),
        (UNNORMALIZER, None, f"{UNNORMALIZER}, which is missing"),
        (NORMALIZER, b"\x00\x01", "can't be read: "),
        ("config.json", b"{oops", r"config.json is no JSON \(.*the checkpoint is damaged"),
        ("config.json", b"\xff\xfe\x00", r"config.json is no JSON \("),
        ("config.json", b"[]", "holds no model"),
        ("train_config.json", b"", r"train_config.json is no JSON \("),
        ("embodix_overrides.json", b"[", r"embodix_overrides.json is no JSON \("),
        ("embodix_architecture.json", b"{", r"embodix_architecture.json is no JSON \("),
        ("embodix_overrides.json", b'["policy=gone"]', r"names no policy that is installed here|do not compose here"),
    ],
)
def test_files_of_a_checkpoint(model: Path, file: str, content: bytes | None, message: str) -> None:
    if content is None:
        (model / file).unlink()
    else:
        (model / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        _open_all(model)


def _open_all(model: Path) -> None:
    source = find_model(model)
    assert source.train_config is not None
    source.compose_run(source.policy_type(), [])
    load(model)


def test_processors_are_whole_or_not_there_at_all(model: Path) -> None:
    require_whole_processors(model)
    (model / NORMALIZER).unlink()
    with pytest.raises(ValueError, match=f"{NORMALIZER}, which is missing"):
        require_whole_processors(model)
    (model / PRE).unlink()
    with pytest.raises(ValueError, match=f"{PRE}, which is missing"):
        require_whole_processors(model)
    (model / POST).unlink()
    require_whole_processors(model)  # a model alone


def test_a_step_that_is_not_installed(model: Path) -> None:
    content = json.loads((model / PRE).read_text())
    content["steps"][0]["registry_name"] = "of_nobody"
    (model / PRE).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"processors of .* can't be made here: .*of_nobody.*of this LeRobot"):
        load(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_action_steps": 7}, r"n_action_steps.*7.*chunk_size.*6|chunk_size.*6.*n_action_steps.*7"),
        ({"n_action_steps": 0}, r"policy.n_action_steps must be at least 1; got 0"),
        ({"n_action_step": 2}, r"policy.n_action_step is no field .*policy.type=pi05; did you mean n_action_steps\?"),
        ({"chunk_size": "many"}, r"Upstream refuses the config of .*'chunk_size': 'many'"),
        ({"device": "cuda:97"}, r"policy.device=cuda:97 was asked for, and upstream falls back to"),
        ({"device": "gpu"}, r"Upstream refuses the config of .*gpu"),
    ],
)
def test_fields_that_the_command_changes(model: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_config(find_model(model), changes)
    assert policy_config(find_model(model), {"n_action_steps": 6}).n_action_steps == 6


def test_a_policy_that_nobody_brings(model: Path) -> None:
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | {"type": "pi99"}))
    with pytest.raises(ValueError, match=r"LeRobot has no policy.type=pi99.*Known: act, .*pi05"):
        policy_config(find_model(model), {})


def test_what_is_renamed_must_be_there() -> None:
    env = decode_env({"type": "embodix_metaworld", "task": "reach-v3", "image_size": 28})
    with pytest.raises(ValueError, match=r"has no observation.images.x. It has .*observation.images"):
        require_provided(env, {"observation.images.x": "observation.images.front"})


@pytest.mark.parametrize("field", ["episode_length", "image_size"])
def test_an_environment_has_a_length_and_pictures(field: str) -> None:
    with pytest.raises(ValueError, match=rf"env.{field} must be at least 1; got 0"):
        decode_env({"type": "embodix_metaworld", "task": "reach-v3", field: 0})
