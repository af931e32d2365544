# SPDX-License-Identifier: Apache-2.0
"""GR00T-N1.5 through upstream's training loop: trained, resumed to the bit, and loaded where embodix is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.groot.modeling_groot import GrootPolicy
from safetensors.torch import load_file

from embodix.patching import patched
from embodix.report.steps import read_steps
from embodix.testing.host_runs import train_here, train_upstream
from embodix_groot.testing import small_groot_run

Weights = dict[str, torch.Tensor]
NUM_STEPS = 6
SCRIPT = Path(__file__).with_name("load_small_groot.py")


@pytest.fixture(scope="module")
def run(demonstrations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of upstream's own computation, with a checkpoint after three."""
    folder = tmp_path_factory.mktemp("groot") / "run"
    options = [f"train.steps={NUM_STEPS}", "train.save_freq=3", f"train.output_dir={folder}", "+plugin=none"]
    return train_here(small_groot_run(demonstrations, *options)).output_dir


@pytest.fixture
def interrupted(run: Path, tmp_path: Path) -> Path:
    """The run as it stood after step 3."""
    folder = shutil.copytree(run, tmp_path / "run", symlinks=True)
    shutil.rmtree(folder / "checkpoints" / "000006")
    (folder / "checkpoints" / "last").unlink()
    (folder / "checkpoints" / "last").symlink_to("000003")
    steps = (folder / "steps.jsonl").read_text().splitlines(keepends=True)
    (folder / "steps.jsonl").write_text("".join(steps[:3]))
    return folder


@pytest.fixture
def assets_taken_away(demonstrations: Path) -> Iterator[Path]:
    """The dataset without the assets that were made beside it; they are put back."""
    made, aside = demonstrations / "groot_n15", demonstrations / "groot_n15.aside"
    made.rename(aside)
    yield made
    shutil.rmtree(made, ignore_errors=True)
    aside.rename(made)


def _assert_same_run(resumed: Path, whole: Path, weights_of: Callable[[Path], Weights]) -> None:
    ours, theirs = read_steps(resumed / "steps.jsonl"), read_steps(whole / "steps.jsonl")
    assert [record.step for record in ours] == list(range(1, NUM_STEPS + 1))
    assert [record.loss for record in ours] == [record.loss for record in theirs]
    resumed_weights, whole_weights = weights_of(resumed), weights_of(whole)
    assert resumed_weights.keys() == whole_weights.keys()
    assert [name for name in whole_weights if not torch.equal(resumed_weights[name], whole_weights[name])] == []


def test_the_front_trains_what_upstream_trains(
    demonstrations: Path, run: Path, tmp_path: Path, weights_of: Callable[[Path], Weights]
) -> None:
    folder = tmp_path / "upstream"
    overrides = small_groot_run(demonstrations, f"train.steps={NUM_STEPS}", f"train.output_dir={folder}")
    losses = train_upstream(overrides, needed=["lerobot_groot_runs"])
    assert [record.loss for record in read_steps(run / "steps.jsonl")] == losses
    assert len(set(losses)) == NUM_STEPS
    ours, upstreams = weights_of(run), weights_of(folder)
    assert [name for name in ours if not torch.equal(ours[name], upstreams[name])] == []


def test_resuming_equals_not_stopping(run: Path, interrupted: Path, weights_of: Callable[[Path], Weights]) -> None:
    result = train_here([f"resume={interrupted}"])
    assert [record.step for record in result.records] == [4, 5, 6]
    _assert_same_run(interrupted, run, weights_of)


def test_resuming_makes_lost_assets_again(
    run: Path, interrupted: Path, assets_taken_away: Path, weights_of: Callable[[Path], Weights]
) -> None:
    train_here([f"resume={interrupted}"])
    assert [path.name for path in assets_taken_away.iterdir()] == [_config(run)["tokenizer_assets_repo"].split("/")[-1]]
    _assert_same_run(interrupted, run, weights_of)


def test_assets_of_another_dataset_are_refused(interrupted: Path) -> None:
    config = interrupted / "checkpoints" / "000003" / "pretrained_model" / "train_config.json"
    config.write_text(config.read_text().replace("/groot_n15/", "/elsewhere/0"))
    with pytest.raises(ValueError, match=r"is not there, and the assets of this dataset and architecture are others"):
        train_here([f"resume={interrupted}"])


@pytest.mark.parametrize("plugin", ["none", "embodix"])
def test_a_base_model_on_disk_is_fine_tuned(demonstrations: Path, run: Path, tmp_path: Path, plugin: str) -> None:
    """The real size's own way, with everything at upstream's defaults (bfloat16 compute, frozen backbone) but paths."""
    assets = Path(_config(run)["tokenizer_assets_repo"])
    sizes = ["policy.chunk_size=6", "policy.n_action_steps=3", "policy.max_state_dim=8", "policy.max_action_dim=8"]
    places = [f"policy.base_model_path={assets}/base_model", f"policy.tokenizer_assets_repo={assets}"]
    steps = ["train.steps=2", "train.batch_size=3", "train.num_workers=0", "train.eval_freq=0", "policy.device=cpu"]
    folder = f"train.output_dir={tmp_path}/run"
    overrides = ["policy=groot_n15", f"dataset.root={demonstrations}", *sizes, *places, *steps, folder]
    result = train_here([*overrides, f"+plugin={plugin}"])
    assert len(result.records) == 2
    assert all(record.grad_norm > 0 for record in result.records)
    base = load_file(assets / "base_model" / "model.safetensors")
    trained = load_file(result.output_dir / "checkpoints/last/pretrained_model/model.safetensors")
    moved = {name for name, tensor in base.items() if not torch.equal(trained[f"_groot_model.{name}"], tensor)}
    assert moved
    assert all(name.startswith("action_head.") for name in moved), "the backbone is frozen and is the file's"
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}


def test_language_upstream_trains_the_first_samples_instruction(demonstrations: Path, tmp_path: Path) -> None:
    """The recording has two tasks, so some batch mixes them, and the two choices part there and not before."""
    losses = {}
    for language in ("per_sample", "upstream"):
        options = [f"language={language}", f"train.output_dir={tmp_path}/{language}", "train.save_checkpoint=false"]
        losses[language] = [r.loss for r in train_here(small_groot_run(demonstrations, *options)).records]
    assert losses["per_sample"] != losses["upstream"]


def _config(run: Path) -> dict[str, Any]:
    path = run / "checkpoints" / "last" / "pretrained_model" / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def test_the_checkpoint_is_upstreams_type_and_names_its_files(run: Path, demonstrations: Path) -> None:
    config = _config(run)
    assert config["type"] == "groot"
    for field in ("tokenizer_assets_repo", "base_model_path"):
        assert Path(config[field]).is_dir()
        assert (demonstrations / "groot_n15").resolve() in Path(config[field]).parents


def _raw_batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    images = {
        f"observation.images.{name}": torch.rand(1, 3, 28, 28, generator=generator) for name in ("front", "gripper")
    }
    return {**images, "observation.state": torch.rand(1, 4, generator=generator), "task": ["reach the goal"]}


@pytest.mark.slow
def test_plain_lerobot_loads_the_checkpoint(
    run: Path, tmp_path: Path, new_environment: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same actions, from the same noise, as with embodix and its patches."""
    model = run / "checkpoints" / "last" / "pretrained_model"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    torch.save(_raw_batch(), tmp_path / "batch.pt")
    plain = new_environment("plain_groot")
    done = plain.run("python", SCRIPT, model, tmp_path / "batch.pt", tmp_path / "actions.pt")
    assert done.returncode == 0, done.stderr[-4000:]
    theirs = torch.load(tmp_path / "actions.pt")

    with patched({"lerobot_groot_runs": {}, "lerobot_groot_strict_load": {}, "lerobot_groot_samples": {}}):
        policy = GrootPolicy.from_pretrained(model)
        preprocess, postprocess = make_pre_post_processors(policy.config, pretrained_path=str(model))
        torch.manual_seed(0)
        actions = policy.predict_action_chunk(preprocess(_raw_batch()))
    assert actions.shape == (1, 6, 4)
    torch.testing.assert_close(theirs["actions"], actions, rtol=0, atol=1e-6)
    torch.testing.assert_close(theirs["first"], postprocess(actions[:, 0]), rtol=0, atol=1e-6)
