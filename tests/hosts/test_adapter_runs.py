# SPDX-License-Identifier: Apache-2.0
"""Adapters through upstream's training loop and back: trained with and without the plugin, resumed, merged, judged."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
from lerobot.policies.factory import make_policy, make_pre_post_processors
from peft import PeftModel
from safetensors.torch import load_file

from embodix.checkpoints.merging import merge_adapters
from embodix.checkpoints.model_folder import find_model
from embodix.checkpoints.policy_loading import PolicyChoices, loaded_policy, prepared_host
from embodix.patching import replace_attribute
from embodix.report.steps import read_steps
from embodix.testing.host_runs import train_here, train_upstream
from embodix.training.host_config import decode_env
from embodix_groot.testing import small_groot_run
from embodix_pi05.testing import small_run

SMALL = {"pi05": small_run, "groot": small_groot_run}
MODEL = Path("checkpoints/last/pretrained_model")
NUM_STEPS = 6


@pytest.fixture(scope="module")
def overrides_of(demonstrations: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Overrides of a run that trains adapters of a policy beside weights trained once."""

    @functools.cache
    def base(policy: str) -> Path:
        folder = tmp_path_factory.mktemp(f"base_{policy}") / "run"
        train_here(SMALL[policy](demonstrations, "train.steps=1", f"train.output_dir={folder}"))
        return folder / MODEL

    def overrides(policy: str, folder: Path, *further: str) -> list[str]:
        adapters = ("peft=lora", "peft.r=4", f"policy.pretrained_path={base(policy)}", "dataset.episodes=[0]")
        run = (f"train.steps={NUM_STEPS}", "train.save_freq=3", f"train.output_dir={folder}")
        return SMALL[policy](demonstrations, *adapters, *run, *further)

    return overrides


@pytest.fixture(scope="module")
def run_of(
    overrides_of: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """A run of adapters with a checkpoint after three steps and at its end."""

    @functools.cache
    def train(policy: str, plugin: str) -> Path:
        folder = tmp_path_factory.mktemp(f"{policy}_{plugin}") / "run"
        return train_here(overrides_of(policy, folder, f"+plugin={plugin}")).output_dir

    return train


def _losses(run: Path) -> list[float]:
    return [record.loss for record in read_steps(run / "steps.jsonl")]


def _adapters(run: Path) -> dict[str, torch.Tensor]:
    found = load_file(run / MODEL / "adapter_model.safetensors")
    assert found
    assert all("lora_" in name for name in found)
    return found


def test_the_front_trains_the_adapters_that_upstream_trains(
    overrides_of: Callable[..., list[str]], run_of: Callable[[str, str], Path], tmp_path: Path
) -> None:
    losses = train_upstream(overrides_of("pi05", tmp_path / "upstream"))
    assert _losses(run_of("pi05", "none")) == losses
    ours, upstreams = _adapters(run_of("pi05", "none")), _adapters(tmp_path / "upstream")
    assert ours.keys() == upstreams.keys()
    assert [name for name in ours if not torch.equal(ours[name], upstreams[name])] == []


@pytest.mark.parametrize("policy", list(SMALL))
def test_losses_are_the_same_with_and_without_the_plugin(policy: str, run_of: Callable[[str, str], Path]) -> None:
    packed, upstream = _losses(run_of(policy, "embodix")), _losses(run_of(policy, "none"))
    assert len(packed) == NUM_STEPS
    assert packed == pytest.approx(upstream, rel=1e-5)
    assert len(set(packed)) == NUM_STEPS


@pytest.mark.parametrize("policy", list(SMALL))
def test_resuming_goes_on_with_the_trained_adapters(
    policy: str, run_of: Callable[[str, str], Path], tmp_path: Path
) -> None:
    whole = run_of(policy, "embodix")
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    shorter = ("train.steps=5", "schedule.on_resume=keep", "train.save_freq=1")
    first = train_here([f"resume={run}/checkpoints/000003", *shorter])
    second = train_here([f"resume={run}", f"train.steps={NUM_STEPS}", "schedule.on_resume=keep"])
    assert [record.loss for record in first.records + second.records] == _losses(whole)[3:]
    resumed, uninterrupted = _adapters(run), _adapters(whole)
    assert [name for name in uninterrupted if not torch.equal(resumed[name], uninterrupted[name])] == []


def test_without_the_patch_upstream_begins_again(run_of: Callable[[str, str], Path], tmp_path: Path) -> None:
    """What the patch is against: trained adapters are overwritten without a word."""
    from embodix.training import host_context

    whole = run_of("pi05", "none")
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    undo = replace_attribute(host_context, "adapter_patches", lambda *_: {})
    try:
        result = train_here([f"resume={run}/checkpoints/000003"])
    finally:
        undo()
    assert [record.loss for record in result.records] != _losses(whole)[3:]


def test_composed_batches_and_checkpointed_layers_train_adapters(
    overrides_of: Callable[..., list[str]], tmp_path: Path
) -> None:
    choices = ("+plugin=embodix", "packing=token_budget", "policy.gradient_checkpointing=true", "train.steps=3")
    result = train_here(overrides_of("pi05", tmp_path / "run", *choices))
    assert len(result.records) == 3
    assert all(torch.isfinite(weight).all() for weight in _adapters(tmp_path / "run").values())
    assert any(name.endswith("lora_B.weight") and weight.any() for name, weight in _adapters(tmp_path / "run").items())


def test_adapters_are_trained_beside_products_in_low_precision(
    overrides_of: Callable[..., list[str]], tmp_path: Path
) -> None:
    targets = "peft.target_modules='.*language_model.*(q|v)_proj'"
    losses = {}
    for precision in ("none", "fp8_block_emulated"):
        folder = tmp_path / precision
        choices = ("+plugin=embodix", targets, f"precision={precision}", "train.steps=2")
        losses[precision] = [record.loss for record in train_here(overrides_of("pi05", folder, *choices)).records]
    converted = json.loads((folder / "manifest.json").read_text())["settings"]["precision"]["converted"]
    assert len(converted) == 3 * 7
    assert sum(module["path"].endswith("_proj.base_layer") for module in converted) == 3 * 2
    assert losses["fp8_block_emulated"] != losses["none"]
    assert losses["fp8_block_emulated"] == pytest.approx(losses["none"], rel=0.05)


def test_alpha_scales_the_adapters(overrides_of: Callable[..., list[str]], tmp_path: Path) -> None:
    """A scale of lora_alpha / r: the file says so, and the second step, after the first change, has another loss."""
    losses = {}
    for alpha in (8, 64):
        folder = tmp_path / str(alpha)
        options = ("+plugin=embodix", f"peft.lora_alpha={alpha}", "train.steps=2")
        losses[alpha] = [record.loss for record in train_here(overrides_of("pi05", folder, *options)).records]
        assert json.loads((folder / MODEL / "adapter_config.json").read_text())["lora_alpha"] == alpha
    assert losses[8][0] == losses[64][0]
    assert losses[8][1] != losses[64][1]


@pytest.fixture(scope="module")
def merged_of(run_of: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The merged policy of a run's adapters."""

    @functools.cache
    def merge(policy: str) -> Path:
        folder = tmp_path_factory.mktemp(f"merged_{policy}") / "model"
        assert merge_adapters(find_model(run_of(policy, "embodix")), folder).num_adapters > 3
        return folder

    return merge


@contextmanager
def _upstreams_policy(model: Path, dataset: Path) -> Iterator[tuple[Any, Any]]:
    """What upstream's own ``make_policy`` and processors make of a model folder; sizes and assets are there."""
    source = find_model(model)
    with prepared_host(source, source.compose_run(source.policy_type(), [])):
        config = PreTrainedConfig.from_pretrained(source.model)
        config.pretrained_path = Path(source.model)
        preprocess, _ = make_pre_post_processors(config, pretrained_path=source.model)
        yield make_policy(config, LeRobotDatasetMetadata("local", root=dataset)).eval(), preprocess


def _actions(policy: Any, preprocess: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    images = {
        f"observation.images.{name}": torch.rand(1, 3, 28, 28, generator=generator) for name in ("front", "gripper")
    }
    batch = {**images, "observation.state": torch.rand(1, 4, generator=generator), "task": ["reach the goal"]}
    torch.manual_seed(0)
    actions: torch.Tensor = policy.predict_action_chunk(preprocess(batch))
    return actions


@pytest.mark.parametrize("policy", list(SMALL))
def test_the_merged_policy_acts_as_its_adapters_do(
    policy: str, run_of: Callable[[str, str], Path], merged_of: Callable[[str], Path], demonstrations: Path
) -> None:
    """Both by upstream's own loading; the base without its adapters acts otherwise."""
    run, merged = run_of(policy, "embodix"), merged_of(policy)
    with _upstreams_policy(run, demonstrations) as (adapted, preprocess):
        assert isinstance(adapted, PeftModel)
        wanted = _actions(adapted, preprocess)
        with adapted.disable_adapter():
            base = _actions(adapted, preprocess)
    with _upstreams_policy(merged, demonstrations) as (plain, preprocess):
        assert not isinstance(plain, PeftModel)
        assert not [name for name, _ in plain.named_parameters() if "lora" in name]
        torch.testing.assert_close(_actions(plain, preprocess), wanted, rtol=0, atol=1e-5)
    assert (base - wanted).abs().max() > 1e-4
    assert not list(merged.glob("*adapter*"))


def test_adapters_and_merged_policy_act_alike_where_they_are_evaluated(
    run_of: Callable[[str, str], Path], merged_of: Callable[[str], Path]
) -> None:
    """The packed computation, with the features of the run."""
    actions = {}
    for model in (run_of("pi05", "embodix"), merged_of("pi05")):
        environment = decode_env({"type": "embodix_metaworld", "task": "reach-v3", "image_size": 28})
        with loaded_policy(find_model(model), environment, PolicyChoices()) as loaded:
            assert loaded.description["features"]["replaced"] == ["forward", "predict_action_chunk"]
            actions[model] = _actions(loaded.policy, loaded.preprocessor)
    adapted, merged = actions.values()
    torch.testing.assert_close(merged, adapted, rtol=0, atol=1e-5)


def test_the_merged_policy_is_trained_on(
    merged_of: Callable[[str], Path], demonstrations: Path, tmp_path: Path
) -> None:
    overrides = ("train.steps=1", f"policy.pretrained_path={merged_of('pi05')}", f"train.output_dir={tmp_path}/run")
    assert len(train_here(small_run(demonstrations, *overrides, "+plugin=embodix")).records) == 1


def test_a_base_that_is_gone_is_named(run_of: Callable[[str, str], Path], tmp_path: Path) -> None:
    model = shutil.copytree(run_of("pi05", "none") / MODEL, tmp_path / "model")
    config = json.loads((model / "adapter_config.json").read_text())
    kept = config["base_model_name_or_path"]
    (model / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/gone/base"}))
    with pytest.raises(ValueError, match=rf"weights of /gone/base: there is no such folder.*lerobot merge {model} "):
        merge_adapters(find_model(model), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    merge_adapters(find_model(model), tmp_path / "merged", base=kept)
    with pytest.raises(ValueError, match=r"merged exists. Give another folder."):
        merge_adapters(find_model(model), tmp_path / "merged", base=kept)
    with pytest.raises(ValueError, match=r"takes a checkpoint with adapters \(adapter_model.safetensors\)"):
        merge_adapters(find_model(tmp_path / "merged"), tmp_path / "again")
