# SPDX-License-Identifier: Apache-2.0
"""Mixtures through upstream's unmodified training loop: trained, resumed, saved, and loaded member by member."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.configs.default import DatasetConfig
from lerobot.configs.policies import PreTrainedConfig
from lerobot.datasets.factory import make_dataset
from lerobot.datasets.feature_utils import dataset_to_policy_features
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.pi05.modeling_pi05 import PI05Policy
from torch.utils.data import default_collate

from embodix.attention.cpu import SegmentAuto
from embodix.checkpoints.merging import merge_adapters
from embodix.checkpoints.model_folder import find_model
from embodix.config.compose import compose
from embodix.data.embodiments import embodiment_folder, load_embodiment
from embodix.data.tokenizer import offline_tokenizer
from embodix.evaluation.evaluate import run_evaluation
from embodix.packing.layout import PaddingFreePacker
from embodix.patching import patched
from embodix.policies.settings import FastPathSettings
from embodix.quantization.accuracy_gate import gate_checkpoint
from embodix.report.steps import read_steps
from embodix.schema.gate import AccuracyGateSettings
from embodix.testing.host_runs import train_here
from embodix.training.session import TrainingSession, current_session
from embodix_fp8.fp8_block import Fp8BlockQuantizer
from embodix_groot.testing import small_groot_run
from embodix_groot.wrapper import GrootN15Wrapper
from embodix_pi05.testing import small_run

Weights = dict[str, torch.Tensor]
MEMBERS = (
    "dataset.members={{arm: {{repo_id: embodix/arm, root: {arm}, weight: 0.7, cameras: {{front: base, wrist: wrist}}}},"
    " hands: {{repo_id: embodix/hands, root: {hands}, weight: 0.3,"
    " cameras: {{left: base, right: left_wrist, top: wrist}}}}}}"
)


@pytest.fixture(scope="module")
def mixture_run(arm_dataset: Path, hands_dataset: Path, demonstrations: Path) -> Callable[..., list[str]]:
    """Overrides of a small run on both members."""

    def overrides(*options: str, policy: Callable[..., list[str]] = small_run) -> list[str]:
        own = [option for option in policy(demonstrations) if not option.startswith("dataset.root")]
        data = ["dataset=mixture", MEMBERS.format(arm=arm_dataset, hands=hands_dataset)]
        sizes = [
            "policy.max_action_dim=16",
            "policy.max_state_dim=16",
            f"tokenizer.directory={demonstrations}/tokenizer",
        ]
        if policy is small_run:
            sizes.append("policy.tokenizer_max_length=96")
        return [*own, *data, *sizes, *options]

    return overrides


@pytest.fixture(scope="module")
def whole_run(mixture_run: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight packed steps of six over an epoch of 36 draws, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    options = ("train.steps=8", "train.batch_size=6", "train.save_freq=1", "train.num_workers=2", "+plugin=embodix")
    return train_here(mixture_run(*options, f"train.output_dir={folder}")).output_dir


def losses_of(overrides: list[str]) -> list[float]:
    return [record.loss for record in train_here(overrides).records]


def test_the_packed_run_equals_the_padded_baseline(mixture_run: Callable[..., list[str]], tmp_path: Path) -> None:
    options = ("train.save_checkpoint=false", "train.steps=4")
    losses = {
        plugin: losses_of(mixture_run(*options, f"+plugin={plugin}", f"train.output_dir={tmp_path}/{plugin}"))
        for plugin in ("none", "embodix")
    }
    assert losses["embodix"] == pytest.approx(losses["none"], rel=1e-6)
    assert len(set(losses["none"])) == 4


def test_adapters_of_a_mixture_are_trained_and_merged_for_each_member(
    mixture_run: Callable[..., list[str]], whole_run: Path, tmp_path: Path
) -> None:
    base = whole_run / "checkpoints" / "last" / "pretrained_model"
    options = ("peft=lora", "peft.r=2", f"policy.pretrained_path={base}", "train.steps=2", "train.save_freq=2")
    losses = {
        plugin: losses_of(mixture_run(*options, f"+plugin={plugin}", f"train.output_dir={tmp_path}/{plugin}"))
        for plugin in ("none", "embodix")
    }
    assert losses["embodix"] == pytest.approx(losses["none"], rel=1e-5)
    merged = tmp_path / "merged"
    assert merge_adapters(find_model(tmp_path / "embodix"), merged).num_adapters == 2 * 3 + 2
    for member in ("arm", "hands"):
        folder = merged / "embodiments" / member
        assert not list(folder.glob("adapter*"))
        assert (folder / "model.safetensors").resolve() == merged / "model.safetensors"
        assert json.loads((folder / "config.json").read_text())["use_peft"] is False
    with pytest.raises(ValueError, match=r"is one embodiment of a mixture; give the whole one: .*/pretrained_model"):
        merge_adapters(
            find_model(tmp_path / "embodix/checkpoints/last/pretrained_model/embodiments/arm"), tmp_path / "x"
        )


def test_the_manifest_tells_the_mixture(whole_run: Path) -> None:
    data = json.loads((whole_run / "manifest.json").read_text())["settings"]["data"]
    assert data["shares"] == {"arm": pytest.approx(25 / 36, abs=1e-6), "hands": pytest.approx(11 / 36, abs=1e-6)}
    assert {"member": "arm", "camera": None, "slot": "observation.images.left_wrist"} in data["cameras"]
    assert data["preprocessing"] == "workers" and data["reads"] == "columns"


@pytest.mark.parametrize("step", [3, 6, 7], ids=["within_an_epoch", "at_its_end", "in_the_next"])
def test_a_resumed_run_is_the_uninterrupted_one(
    whole_run: Path, tmp_path: Path, step: int, weights_of: Callable[[Path], Weights]
) -> None:
    resumed = shutil.copytree(whole_run, tmp_path / "run", symlinks=True)
    for later in range(step + 1, 9):
        shutil.rmtree(resumed / "checkpoints" / f"{later:06d}")
    (resumed / "checkpoints" / "last").unlink()
    (resumed / "checkpoints" / "last").symlink_to(f"{step:06d}")
    train_here([f"resume={resumed}"])
    ours, theirs = read_steps(resumed / "steps.jsonl"), read_steps(whole_run / "steps.jsonl")
    assert [record.loss for record in ours] == [record.loss for record in theirs]
    mine, whole = weights_of(resumed), weights_of(whole_run)
    assert [name for name in whole if not torch.equal(mine[name], whole[name])] == []


@pytest.mark.parametrize(("member", "dims"), [("arm", 7), ("hands", 14)])
def test_plain_upstream_evaluates_a_member(
    whole_run: Path, demonstrations: Path, member: str, dims: int, arm_dataset: Path, hands_dataset: Path
) -> None:
    """A member's folder is a pretrained model: upstream's own loading, preprocessing, policy and postprocessing."""
    model_dir = whole_run / "checkpoints" / "last" / "pretrained_model"
    folder = embodiment_folder(model_dir, member)
    dataset = LeRobotDataset(f"embodix/{member}", root={"arm": arm_dataset, "hands": hands_dataset}[member])
    frame = default_collate([dataset[3]])
    sizes: Any = json.loads((model_dir / "embodix_architecture.json").read_text())
    with patched({"lerobot_pi05_sizes": {"architecture": sizes}}), offline_tokenizer(demonstrations / "tokenizer"):
        policy = PI05Policy.from_pretrained(folder).eval()
        pre, post = make_pre_post_processors(PreTrainedConfig.from_pretrained(folder), pretrained_path=str(folder))
        torch.manual_seed(0)
        actions = post(policy.predict_action_chunk(pre(dict(frame)))[:, 0])
        wide = PI05Policy.from_pretrained(model_dir).eval()
        own_pre, own_post = load_embodiment(model_dir, member)
        torch.manual_seed(0)
        wide_actions = wide.predict_action_chunk(own_pre(dict(frame)))[:, 0]
    assert actions.shape == (1, dims) and wide_actions.shape == (1, 14)
    assert torch.equal(own_post(wide_actions), actions)
    low, high = (torch.as_tensor(dataset.meta.stats["action"][name]) for name in ("q01", "q99"))
    middle = (low + high) / 2
    assert ((actions - middle).abs() < 6 * (high - low)).all()  # in the member's own units


def test_the_accuracy_gate_takes_the_chosen_members_samples(whole_run: Path) -> None:
    source = find_model(whole_run)
    cfg = source.compose_run("pi05", [])
    settings = AccuracyGateSettings(num_samples=4, batch_size=2)
    result = gate_checkpoint(source, cfg, Fp8BlockQuantizer(activations="high"), settings)
    assert result.samples.endswith(
        "arm: the last 2 of the 2 episodes that training saw: of their tasks it left fewer than two out"
    )
    assert len(result.comparison.chunk.dimensions) == 7
    assert result.comparison.chunk.cosine > 0.999
    assert all(layer.weight_db > 28 for layer in result.comparison.layers)


def test_the_checkpoints_top_level_is_the_chosen_member(whole_run: Path) -> None:
    model_dir = whole_run / "checkpoints" / "last" / "pretrained_model"
    state = "policy_preprocessor_step_3_normalizer_processor.safetensors"
    assert (model_dir / state).read_bytes() == (model_dir / "embodiments" / "arm" / state).read_bytes()
    assert (model_dir / state).read_bytes() != (model_dir / "embodiments" / "hands" / state).read_bytes()
    with pytest.raises(ValueError, match=r"holds no embodiment 'leg'; it holds: arm, hands"):
        load_embodiment(model_dir, "leg")


def test_groot_trains_on_a_mixture(mixture_run: Callable[..., list[str]], tmp_path: Path) -> None:
    options = ("train.save_checkpoint=false", "train.steps=3")
    losses = {
        plugin: losses_of(
            mixture_run(*options, f"+plugin={plugin}", f"train.output_dir={tmp_path}/{plugin}", policy=small_groot_run)
        )
        for plugin in ("none", "embodix")
    }
    assert losses["embodix"] == pytest.approx(losses["none"], rel=1e-6)


@pytest.fixture
def groot_session(mixture_run: Callable[..., list[str]], tmp_path: Path) -> TrainingSession:
    """A finished run, with its policy, data set and collate function."""
    options = ("train.save_checkpoint=false", "train.steps=1", f"train.output_dir={tmp_path}/run", "+plugin=embodix")
    train_here(mixture_run(*options, policy=small_groot_run))
    return current_session()


@pytest.mark.parametrize("kept", [0, 1])
def test_a_loss_of_groot_depends_on_no_neighbour(groot_session: TrainingSession, kept: int) -> None:
    """Neighbours of either member change nothing, nor do images and actions that are not numbers."""
    policy, data = groot_session.policy.train(), groot_session.data
    settings = FastPathSettings(PaddingFreePacker(), SegmentAuto())
    patches = {"lerobot_groot_runs": {}, "lerobot_groot_samples": {"language": "per_sample"}}
    installation = GrootN15Wrapper().install(policy, settings)

    def losses(batch: dict[str, Any]) -> torch.Tensor:
        torch.manual_seed(0)
        with torch.no_grad():
            return policy(batch, reduction="none")[0]

    with patched(patches):
        rows = [(3, 30, 25), (3, 30, 9)] if kept == 1 else [(3, 30, 25), (3, 9, 12), (3, 28, 29)]
        batches = [data.collate([data.dataset[index] for index in indices]) for indices in rows]
    found = [losses(batch) for batch in batches]
    assert all(torch.equal(loss[kept], found[0][kept]) for loss in found)
    assert not torch.equal(found[0][2], found[1][2])
    poisoned = dict(batches[0])
    for key in ("action", "state"):
        poisoned[key] = poisoned[key].clone()
        poisoned[key][[row for row in range(3) if row != kept]] = float("nan")
    images = poisoned["eagle_pixel_values"] = poisoned["eagle_pixel_values"].clone()
    images[2:] = float("nan")
    if kept == 1:
        images[:] = float("nan")
        images[2:5] = batches[0]["eagle_pixel_values"][2:5]
    changed = losses(poisoned)
    installation.uninstall()
    assert torch.equal(changed[kept], found[0][kept])
    assert torch.isnan(changed[[row for row in range(3) if row != kept]]).all()


def test_groots_batches_are_each_members_own(
    groot_session: TrainingSession, arm_dataset: Path, hands_dataset: Path
) -> None:
    """Every row of a mixed batch is that of upstream's preprocessor on the member alone, but for padding."""
    session = groot_session
    dataset, policy_cfg = session.data.dataset, session.host_cfg.policy
    rows = (30, 3, 5, 25)
    with patched({"lerobot_groot_runs": {}, "lerobot_groot_samples": {"language": "per_sample"}}):
        batch = session.data.collate([dataset[index] for index in rows])
        images = iter(batch["eagle_pixel_values"].split([3, 2, 2, 3]))
        for row, index in enumerate(rows):
            number, local = dataset.locate(index)
            root = (arm_dataset, hands_dataset)[number]
            alone = alone_batch(policy_cfg, session.host_cfg, root, local)
            length = alone["eagle_input_ids"].shape[1]
            for key in ("eagle_input_ids", "eagle_attention_mask"):
                assert torch.equal(batch[key][row, -length:], alone[key][0]), key
            assert not batch["eagle_attention_mask"][row, :-length].any()
            assert torch.equal(next(images), alone["eagle_pixel_values"])
            for key in ("state", "state_mask", "action", "action_mask", "embodiment_id"):
                assert torch.equal(batch[key][row], alone[key][0]), key
    assert batch["action_mask"][:, 0].sum(dim=1).tolist() == [14, 7, 7, 14]


def alone_batch(policy_cfg: Any, host_cfg: Any, root: Path, local: int) -> dict[str, Any]:
    """One sample of a member, as upstream preprocesses it in a run on this member alone."""
    config = copy.deepcopy(policy_cfg)
    data = DatasetConfig(repo_id=f"embodix/{root.name}", root=str(root))
    dataset = make_dataset(dataclasses.replace(host_cfg, policy=config, dataset=data))
    config.input_features = dataset_to_policy_features(dataset.meta.features)
    config.output_features = {"action": config.input_features.pop("action")}
    preprocessor, _ = make_pre_post_processors(config, dataset_stats=dataset.meta.stats)
    return preprocessor(default_collate([dataset[local]]))


def test_a_member_is_evaluated_in_its_own_units_and_cameras(
    mixture_run: Callable[..., list[str]], demonstrations: Path, tmp_path: Path
) -> None:
    """While training and afterwards: the simulator's cameras go to the member's slots, actions come in its units."""
    member = f"sim: {{repo_id: e/sim, root: {demonstrations}, cameras: {{front: base, gripper: wrist}}}}"
    options = [f"+dataset.members.{member.replace(': ', '=', 1)}", "+dataset.members.sim.weight=0.5"]
    options += ["dataset.evaluate_as=sim", "env=metaworld", "env.image_size=28", "env.episode_length=3"]
    options += ["train.steps=2", "train.eval_freq=2", "eval.n_episodes=1", "eval.batch_size=1"]
    folder = tmp_path / "run"
    train_here(mixture_run(*options, "+plugin=embodix", f"train.output_dir={folder}"))
    assert list((folder / "eval").rglob("*.mp4"))
    choices = ["eval.n_episodes=1", "eval.num_workers=0", "eval.videos=0"]
    cfg = compose("eval", [f"checkpoint={folder}", *choices])
    (evaluation,) = run_evaluation(cfg, choices, tmp_path / "evaluation")
    assert [episode.num_steps for episode in evaluation.episodes] == [3]


def test_the_example_composes() -> None:
    cfg = compose("train", ["experiment=mixture", "+plugin=embodix"])
    assert cfg.dataset.members.one_camera.root == "data/metaworld_demo"
    assert cfg.packing.name == "padding_free" and cfg.tokenizer.directory == "data/metaworld_demo/tokenizer"


def test_a_missing_dataset_is_named(mixture_run: Callable[..., list[str]], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No LeRobotDataset at dataset.members.arm.root="):
        train_here(mixture_run(f"dataset.members.arm.root={tmp_path}/nowhere", f"train.output_dir={tmp_path}/run"))


def test_a_dataset_without_tasks_is_named(
    mixture_run: Callable[..., list[str]], arm_dataset: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(arm_dataset, tmp_path / "arm")
    (copy / "meta" / "tasks.parquet").unlink()
    with pytest.raises(ValueError, match=r"members.arm: the dataset at .* has no task strings"):
        train_here(mixture_run(f"dataset.members.arm.root={copy}", f"train.output_dir={tmp_path}/run"))


def test_fields_of_one_dataset_are_refused_beside_members(
    mixture_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"dataset has no field 'root'"):
        train_here(mixture_run("+dataset.root=data/arm", f"train.output_dir={tmp_path}/run"))
