# SPDX-License-Identifier: Apache-2.0
"""Adapters through upstream's training loop: the same losses with and without the plugin, resumed to the bit."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from embodix.patching import replace_attribute
from embodix.report.steps import read_steps
from embodix.testing.host_runs import train_here, train_upstream
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
    result = train_here([f"resume={run}/checkpoints/000003"])
    assert [record.loss for record in result.records] == _losses(whole)[3:]
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
