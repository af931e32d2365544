# SPDX-License-Identifier: Apache-2.0
"""What a command may ask of an evaluation, and how its checkpoints are named and found."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.envs.configs import PushtEnv
from lerobot.policies.act.configuration_act import ACTConfig
from omegaconf import OmegaConf

from embodix.checkpoints.env_features import require_fitting_features
from embodix.checkpoints.model_folder import find_model
from embodix.checkpoints.policy_loading import PolicyChoices
from embodix.config.compose import compose, options_of
from embodix.evaluation.choices import check_choices, name_checkpoints, policy_choices
from embodix.evaluation.controls import other_instructions
from embodix.evaluation.evaluate import _remarks
from embodix.evaluation.session import default_num_workers
from embodix.training.host_config import decode_env
from embodix_metaworld.environment import EmbodixMetaworldConfig
from embodix_pi05.prompts import Tally


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, []),
        ("outputs/train/2026-01-01/10-00-00", ["10-00-00"]),
        ("runs/reach/run/checkpoints/last/pretrained_model", ["reach"]),
        (["runs/a", "runs/b/run/checkpoints/000800"], ["a", "b"]),
        (["one/a", "two/a"], ["one_a", "two_a"]),
        (["r/a/checkpoints/000100", "r/a/checkpoints/000200"], ["a.checkpoints.000100", "a.checkpoints.000200"]),
        ({"upstream": "x", "embodix": "y"}, ["upstream", "embodix"]),
        ("lerobot/pi05_base", ["pi05_base"]),
    ],
)
def test_checkpoints_get_names_that_tell_them_apart(value: Any, names: list[str]) -> None:
    assert list(name_checkpoints(value)) == names


@pytest.mark.parametrize("value", [["a", "a"], [], 3, {"a/b": "x"}, {"a": 3}, {"": "x"}])
def test_checkpoints_that_cannot_be_named_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="checkpoint"):
        name_checkpoints(value)


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"type": "act"}))
    return folder


def test_a_model_is_found_from_every_place_of_its_run(tmp_path: Path) -> None:
    model = write_model(tmp_path / "a" / "run" / "checkpoints" / "000005" / "pretrained_model")
    (model.parents[1] / "last").symlink_to("000005")
    (model / "embodix_overrides.json").write_text('["policy=pi05_small"]')
    for place in (
        model,
        model / "config.json",
        model.parent,
        model.parents[1] / "last",
        model.parents[2],
        tmp_path / "a",
    ):
        assert find_model(place).model == str(model)
    assert find_model(model).overrides == ["policy=pi05_small"]
    member = write_model(model / "embodiments" / "arm")
    assert find_model(member).run_files == model
    assert find_model(member).model == str(member)


def test_a_folder_without_model_is_refused_and_a_hub_name_is_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds no model .* Looked in: "):
        find_model(tmp_path)
    assert find_model("lerobot/pi05_base").model == "lerobot/pi05_base"
    assert find_model("lerobot/pi05_base").overrides == []


def test_a_misspelt_folder_is_no_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    with pytest.raises(ValueError, match="checkpoint=outputs/typo holds no model"):
        find_model("outputs/typo")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="no folder somebody/typo, and the hub gave no model of that name"):
        find_model("somebody/typo").policy_type()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "policy needs a checkpoint"),
        (["actor=exper"], "got 'exper'. Did you mean expert?"),
        (["checkpoint=a", "controls=[blnd]"], "got 'blnd'. Did you mean blind?"),
        (["checkpoint=a", "controls=[blind,blind]"], "each once"),
        (["checkpoint=a", "actor=blank_image", "controls=[blank_image]"], "each once"),
        (["actor=expert", "controls=[blank_image]"], "blank_image needs a checkpoint"),
        (["checkpoint=a", "actor=expert", "controls=[blank_image]"], "runs without a policy"),
        (["checkpoint=a", "eval.n_episodes=0"], "at least 1 episode a task; got 0"),
        (["checkpoint=a", "actor=wrong_prompt"], "needs the words"),
    ],
)
def test_choices_that_cannot_be_run_are_refused(overrides: list[str], message: str) -> None:
    cfg = compose("eval", overrides)
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        check_choices(cfg, list(name_checkpoints(cfg.checkpoint)))


def test_only_features_that_the_command_names_replace_those_of_the_run() -> None:
    overrides = ["+plugin=none", "attention=varlen", "env=metaworld", "+policy.n_action_steps=3", "checkpoint=a"]
    choices = policy_choices(compose("eval", overrides), overrides)
    assert choices.features == ["+plugin=none", "attention=varlen"]
    assert choices.policy == {"device": None, "n_action_steps": 3}
    assert choices.rename_map is None


def test_the_wrong_prompt_is_another_tasks() -> None:
    said = {"reach": "Reach", "close": "Close", "again": "Reach"}
    assert other_instructions(said) == {"reach": "Close", "close": "Reach", "again": "Close"}
    assert other_instructions({"reach": "Reach"}, ["Reach", "Push"]) == {"reach": "Push"}
    with pytest.raises(ValueError, match=r"wrong_prompt='\.\.\.'"):
        other_instructions({"reach": "Reach", "again": "Reach"})
    assert default_num_workers() >= 1


def policy_of(cameras: list[str], state: int, action: int = 4) -> ACTConfig:
    features = {f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, 56, 56)) for name in cameras}
    features["observation.state"] = PolicyFeature(FeatureType.STATE, (state,))
    output = {"action": PolicyFeature(FeatureType.ACTION, (action,))}
    return ACTConfig(input_features=features, output_features=output, device="cpu")


def test_features_of_policy_and_environment_must_fit() -> None:
    env = EmbodixMetaworldConfig()
    assert require_fitting_features(policy_of(["front", "gripper"], 4), env, {}) == []
    assert require_fitting_features(policy_of(["front"], 4), env, {}) == []
    (note,) = require_fitting_features(policy_of(["front", "gripper", "side"], 4), env, {})
    assert "no camera side; the policy sees it blank" in note
    renamed = {"observation.images.front": "observation.images.base"}
    assert require_fitting_features(policy_of(["base", "gripper"], 4), env, renamed) == []
    with pytest.raises(ValueError, match=r"through base, gripper, and env\.type=embodix_metaworld shows front, gr"):
        require_fitting_features(policy_of(["base", "gripper"], 4), env, {})
    with pytest.raises(ValueError, match=r"observation\.state of 3 values, and env\.type=embodix_metaworld has 4"):
        require_fitting_features(policy_of(["front"], 3), env, {})
    with pytest.raises(ValueError, match=r"action of 7 values, and env\.type=embodix_metaworld has 4"):
        require_fitting_features(policy_of(["front"], 4, action=7), env, {})


NO_SIMULATORS = {"none", "latency"}  # declared times, for `lerobot rl` alone
ENVIRONMENTS = [option for option in options_of("env") if option not in NO_SIMULATORS]


def test_every_simulator_is_an_option() -> None:
    assert {"metaworld", "libero", "libero_10", "pusht", "maniskill", "isaaclab"} <= set(ENVIRONMENTS)


@pytest.mark.parametrize("option", ENVIRONMENTS)
def test_every_environment_composes_and_decodes_without_its_simulator(option: str) -> None:
    node: Any = OmegaConf.to_container(compose("eval", [f"env={option}"]).env, resolve=True)
    env = decode_env(node)
    assert "action" in env.features_map.values()
    if option == "pusht":
        assert env == PushtEnv()


def test_one_checkpoint_stands_beside_itself_with_other_settings() -> None:
    word = "{one: {path: a, policy.n_action_steps: 1}, all: a, packed: {path: a, packing: x}}"
    value = compose("eval", [f"checkpoint={word}"])
    found = name_checkpoints(OmegaConf.to_container(value.checkpoint))
    assert list(found) == ["one", "all", "packed"]
    assert {checkpoint.path for checkpoint in found.values()} == {"a"}
    command = PolicyChoices(policy={"device": "cpu", "n_action_steps": 9}, features=["packing=none", "attention=auto"])
    assert found["one"].applied_to(command).policy == {"device": "cpu", "n_action_steps": 1}
    assert found["all"].applied_to(command) == command
    assert found["packed"].applied_to(command).features == ["attention=auto", "packing=x"]
    assert found["one"].changes == ["policy.n_action_steps=1"]
    assert found["all"].changes == []


@pytest.mark.parametrize("entry", [{"policy.n_action_steps": 1}, {"path": "a", "eval.n_episodes": 1}, {"path": 3}])
def test_settings_that_are_none_of_a_checkpoints(entry: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"checkpoint=\{one: .*has the path of a checkpoint, fields of its policy"):
        name_checkpoints({"one": entry})


def test_a_rename_map_is_a_mapping() -> None:
    with pytest.raises(ValueError, match=r"rename_map=\{<environment key>: <policy key>\}; got 'abc'"):
        policy_choices(compose("eval", ["rename_map=abc"]), [])


def test_remarks_tell_of_whole_chunks_and_of_shortened_prompts() -> None:
    tally = Tally(64)
    tally.num_prompts = 4
    tally.add("fold the towel", 7)
    step = SimpleNamespace(_embodix_shortened=tally)

    def remarks(n_action_steps: int) -> list[str]:
        config = SimpleNamespace(type="pi05", n_action_steps=n_action_steps, chunk_size=6)
        loaded: Any = SimpleNamespace(policy=SimpleNamespace(config=config), preprocessor=SimpleNamespace(steps=[step]))
        return _remarks(loaded)

    shortened, whole = remarks(6)
    assert "'fold the towel' is shortened: its prompts are up to 7 tokens longer than the 64" in shortened
    assert "1 of 4 prompts (25.0 %)" in shortened
    assert "all 6 actions of each chunk are executed before the policy looks again" in whole
    assert remarks(3) == [shortened]
