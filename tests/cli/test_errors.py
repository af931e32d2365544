# SPDX-License-Identifier: Apache-2.0
"""What a user's mistakes print: the rule, what was got, what to do."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from embodix import Registration, plugins
from embodix.plugins import PluginRecord, load_plugins

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def train(run_verb: Command, tmp_path: Path, demonstrations: Path) -> Callable[..., str]:
    """Run ``lerobot train policy=pi05_small ...`` on the recording; it must fail; what it printed."""

    def run(*overrides: str) -> str:
        base = ["policy=pi05_small", f"dataset.root={demonstrations}", f"hydra.run.dir={tmp_path}/hydra"]
        code, printed = run_verb("train", *base, "train.num_workers=0", *overrides)
        assert code == 1
        assert "Traceback" not in printed
        return printed

    return run


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("atention=varlen", "'atention' is neither a group nor a field of train; did you mean attention"),
        ("attention=varlenn", "'varlenn' is no option of group 'attention' (auto, "),
        ("attention=varlenn", "; did you mean varlen or torch_varlen?"),
        ("experiment=rl_runners", "experiment=rl_runners belongs to bench_rl, rl; train can't have it."),
        ("policy=pi05_smal", "; did you mean pi05_small or pi05?"),
        ("train.stepz=3", "'train.stepz' is neither a group nor a field of train; did you mean train.steps or"),
        ("policy.chunk_sise=3", "did you mean policy.chunk_size or"),
        ("architecture.vision.hidden_sise=3", "did you mean architecture.vision.hidden_size or"),
        ("+policy.chunk_sise=3", "The fields `chunk_sise` are not valid for PI05Config\n Did you mean chunk_size?"),
        ("policy.type=pi06", "Couldn't find a choice class for 'pi06'"),
        ("train.steps=many", "Value 'many' of type 'str' could not be converted to Integer\n    full_key: train.steps"),
        ("policy.chunk_size=many", "`chunk_size`: Couldn't parse 'many' into an int"),
        ("train.steps=[", "'train.steps=[' has [ and ] in unequal numbers."),
        ("flow_samples=0", "flow_samples must be at least 1; got 0."),
    ],
)
def test_misspelt_or_mistyped(train: Callable[..., str], override: str, hint: str) -> None:
    printed = train(override)
    assert hint in printed
    assert "'hydra.run.dir' is neither" not in printed


def test_policy_type_lists_what_exists(train: Callable[..., str]) -> None:
    assert " Did you mean pi0? Known: act, diffusion, groot," in train("policy.type=pi06")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "+packing/extra=none",
            "Config key 'packing/extra' is a group that did not land; is its YAML on Hydra's search path?",
        ),
        (
            "~packing",
            "Group 'packing' must land as a mapping with a name; got {'name': '???', 'options': {}}. Choose one of its "
            "options (packing=<option>) and check that its YAML is on Hydra's search path.",
        ),
    ],
)
def test_group_that_did_not_land(train: Callable[..., str], override: str, message: str) -> None:
    assert message in train(override)


def test_missing_dataset(train: Callable[..., str], tmp_path: Path) -> None:
    assert (
        f"No LeRobotDataset at dataset.root={tmp_path}/nowhere (meta/info.json is missing). Record one with "
        "`lerobot data <source>`, or give the folder of an existing dataset."
    ) in train(f"dataset.root={tmp_path}/nowhere")


def test_dataset_without_tasks(train: Callable[..., str], demonstrations: Path, tmp_path: Path) -> None:
    root = shutil.copytree(demonstrations, tmp_path / "dataset")
    (root / "meta" / "tasks.parquet").unlink()
    assert (
        f"The dataset at {root} has no task strings (meta/tasks.parquet is missing), which a language-conditioned "
        "policy needs. Re-record with a `task` in every frame, or convert it with upstream's dataset tools."
    ) in train(f"dataset.root={root}")


def test_camera_in_no_slot_of_the_policy(train: Callable[..., str]) -> None:
    slot = "{observation.images.wrist:{type:VISUAL,shape:[3,28,28]}}"
    assert (
        "Camera observation.images.front, observation.images.gripper of the dataset is in no slot of the policy. "
        "Policy slots: observation.images.wrist. Dataset cameras: observation.images.front, "
        "observation.images.gripper. Rename with +rename_map={<dataset key>: <policy key>}, or train with "
        "policy.input_features={}."
    ) in train(f"+policy.input_features={slot}")


def test_missing_tokenizer(train: Callable[..., str], tmp_path: Path) -> None:
    printed = train(f"tokenizer.directory={tmp_path}")
    assert f"{tmp_path} holds no tokenizer for google/paligemma-3b-pt-224. `lerobot data` builds" in printed


def test_output_folder_in_use(train: Callable[..., str], tmp_path: Path) -> None:
    printed = train(f"train.output_dir={tmp_path}")
    assert f"Output directory {tmp_path} already exists and resume is False." in printed


def test_backend_that_cannot_run(train: Callable[..., str]) -> None:
    assert (
        "attention=flash_attn_2 can't run on cpu in torch.float32 with head_dim 16: needs a CUDA device, got cpu. "
        "Usable here: segment_auto, segment_gemm, segment_sdpa (or attention=auto)."
    ) in train("attention=flash_attn_2")


def test_unknown_packer(train: Callable[..., str]) -> None:
    message = train("packing.name=padding_fre")
    assert "No packer is called 'padding_fre'; known: none, padding_free" in message
    assert "Did you mean 'padding_free'?" in message


def test_broken_plugin_refuses_the_run(train: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    registry = load_plugins()
    error = "ImportError: no module named 'gone'"
    registry.plugins.append(PluginRecord("third", "third-party 1.0", "third.plugin", error))
    monkeypatch.setattr(plugins, "registry", lambda: registry)
    assert (
        "1 plugin(s) failed to load, so the run is refused. Repair or uninstall them, or run with "
        "strict_plugins=false to leave them out.\n'third' from third-party 1.0 (third.plugin):\n"
        "ImportError: no module named 'gone'"
    ) in train()


def test_host_version_out_of_range(train: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.1" if name == "lerobot" else version(name))
    printed = train()
    assert "does not fit this host: wanted lerobot>=0.5.1,<0.5.2, found 0.6.1; install it: " in printed
    assert "pip install 'lerobot>=0.5.1,<0.5.2'" in printed


def test_resuming_nothing(train: Callable[..., str], tmp_path: Path) -> None:
    printed = train(f"resume={tmp_path}/nowhere")
    assert f"resume={tmp_path}/nowhere holds no complete checkpoint" in printed
    assert "Give a checkpoint file, a checkpoint folder (checkpoints/000100), a run folder or its checkpoints/last" in (
        printed
    )


def test_field_upstream_rejects_when_resuming(run_verb: Command, demonstrations: Path, tmp_path: Path) -> None:
    from embodix.testing.host_runs import train_here
    from embodix_pi05.testing import small_run

    run = tmp_path / "run"
    train_here(small_run(demonstrations, "train.steps=1", f"train.output_dir={run}"))
    assert json.loads((run / "checkpoints/last/pretrained_model/train_config.json").read_text())["steps"] == 1
    code, printed = run_verb("train", f"resume={run}", "+policy.chunk_sise=3", f"hydra.run.dir={tmp_path}/hydra")
    assert code == 1
    assert "The fields `chunk_sise` are not valid for PI05Config\n Did you mean chunk_size?" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", "+controlls=[blind]"], "'controlls' is neither a group nor a field of eval; did you mean controls?"),
        (["quantize", "a", "b", "+gat.enabled=true"], "'gat' is neither a group nor a field of quantize; did you mean"),
        (["compare", "+plugins=embodix"], "'plugins' is neither a group nor a field of compare; did you mean plugin"),
        (["plan", "+hydra.run.dirr=x"], "'hydra.run.dirr' is no field of Hydra; did you mean hydra.run.dir"),
        (
            ["data", "metaworld", "root=x", "+sead=3"],
            "lerobot data metaworld has no option 'sead'. Did you mean 'seed'",
        ),
        (["data", "metaworld", "root=x", "seed=many"], "option 'seed', is a whole number; got 'many'."),
    ],
)
def test_a_misspelt_key_is_refused_by_every_verb(
    run_verb: Command, tmp_path: Path, words: list[str], message: str
) -> None:
    code, printed = run_verb(*words, f"hydra.run.dir={tmp_path}")
    assert code == 1
    assert message in printed
    assert "Traceback" not in printed


def test_doctor_names_a_misspelt_key(capsys: pytest.CaptureFixture[str]) -> None:
    from embodix.cli.doctor import run

    assert run(["+trian.steps=3", "--json"]) == 1
    needs = json.loads(capsys.readouterr().out)["needs"]
    assert any("'trian' is neither a group nor a field of train; did you mean train?" in need for need in needs)


@pytest.mark.parametrize("verb", ["train", "compare", "plan"])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.save_freq=0", "train.save_freq must be at least 1; got 0."),
        ("policy.image_resolution=[60,60]", "must be a multiple of the patch of 14 pixels"),
        ("+optimizer.lr=3", "belongs to no optimizer"),
    ],
)
def test_what_can_not_be_trained_is_refused_before_the_data_is_looked_at(
    run_verb: Command, tmp_path: Path, verb: str, override: str, message: str
) -> None:
    words = ("policy=pi05_small", f"dataset.root={tmp_path}/nowhere", f"hydra.run.dir={tmp_path}/out")
    code, printed = run_verb(verb, *words, override)
    assert code == 1
    assert message in printed
    assert "No LeRobotDataset" not in printed


@pytest.fixture
def registry_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """Registers a target of a kind under a name, by a plugin called ``third``."""
    registry = load_plugins()
    monkeypatch.setattr(plugins, "registry", lambda: registry)
    monkeypatch.setattr("embodix.cli.doctor.load_plugins", lambda: registry)

    def register(kind: str, name: str, target: str) -> None:
        registry.implementations[kind][name] = Registration(name, target, "of a third party")
        registry.providers[kind, name] = "third"

    return register


@pytest.mark.parametrize(
    ("kind", "name", "target", "words", "message"),
    [
        ("verbs", "mine", "nowhere_at_all:run", ["mine"], "verb 'mine' of plugin 'third' cannot be imported from nowh"),
        ("schemas", "mine", "nowhere_at_all:register", ["plan"], "schema 'mine' of plugin 'third' cannot be imported"),
        ("schemas", "mine", "operator:add", ["plan"], "schema 'mine' of plugin 'third' can't be registered: TypeError"),
        (
            "packers",
            "mine",
            "nowhere_at_all:P",
            ["plan", "packing.name=mine"],
            "packer 'mine' of plugin 'third' cannot",
        ),
    ],
)
def test_what_a_run_needs_of_a_broken_plugin_is_named(
    registry_with: Callable[[str, str, str], None],
    run_verb: Command,
    tmp_path: Path,
    kind: str,
    name: str,
    target: str,
    words: list[str],
    message: str,
) -> None:
    registry_with(kind, name, target)
    code, printed = run_verb(*words, "policy=pi05_small", f"hydra.run.dir={tmp_path}")
    assert code == 1
    assert message in printed
    assert "Traceback" not in printed


def test_doctor_goes_on_where_a_schema_is_broken(
    registry_with: Callable[[str, str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    from embodix.cli.doctor import run

    registry_with("schemas", "mine", "operator:add")
    assert run(["--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert any("schema 'mine' of plugin 'third' can't be registered" in need for need in printed["needs"])
    assert printed["machine"]["num_cores"] >= 1 and len(printed["implementations"]) > 50
