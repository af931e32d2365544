# SPDX-License-Identifier: Apache-2.0
"""``lerobot eval`` on a checkpoint, from the command line to results, page and episodes."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embodix.cli.main import dispatch
from embodix.testing.host_runs import train_here
from embodix_pi05.testing import small_run

pytestmark = pytest.mark.slow
Command = Callable[..., tuple[int, str, str]]
TASKS = "env.task=[reach-v3,button-press-topdown-v3]"


@pytest.fixture(scope="module")
def run_folder(demonstrations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with the simulator it is to be evaluated in, packed."""
    folder = tmp_path_factory.mktemp("evaluated") / "two_tasks" / "run"
    simulator = ["env=metaworld", TASKS, "env.image_size=28", "env.episode_length=8"]
    train_here(small_run(demonstrations, "train.steps=1", f"train.output_dir={folder}", "+plugin=embodix", *simulator))
    return folder


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Exit code, output and error output of ``lerobot eval`` in this process, without workers."""
    monkeypatch.setattr(sys, "argv", ["lerobot"])

    def run(folder: Path, *overrides: str) -> tuple[int, str, str]:
        capsys.readouterr()
        flags = [word for word in overrides if word.startswith("-")]
        fields = [word for word in overrides if not word.startswith("-")]
        words = [*flags, "eval.n_episodes=2", "eval.num_workers=0", f"hydra.run.dir={folder}", *fields]
        code = dispatch("lerobot", ["eval", *words])
        return code, *capsys.readouterr()

    return run


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def assert_same_episodes(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """The same outcomes; rewards up to the last digits, where batches or workers may differ."""
    assert len(found["episodes"]) == len(wanted["episodes"])
    for mine, theirs in zip(found["episodes"], wanted["episodes"], strict=True):
        assert mine == {
            **theirs,
            **{name: pytest.approx(theirs[name], rel=1e-6) for name in ("sum_reward", "max_reward")},
        }


def test_a_checkpoint_and_its_controls(
    evaluate: Command, run_folder: Path, demonstrations: Path, tmp_path: Path
) -> None:
    code, printed, _ = evaluate(tmp_path, f"checkpoint={run_folder}", "controls=[blind,blank_image,wrong_prompt]")
    assert code == 0
    assert "two_tasks: 4/4 episodes, " in printed
    assert "0/4 = 0 % [0 % to 49 %]" in printed
    record = results(tmp_path)
    assert record["checkpoint"] == str(run_folder / "checkpoints" / "000001" / "pretrained_model")
    assert [(e["task"], e["seed"]) for e in record["episodes"]] == [
        (task, seed) for task in ("reach-v3", "button-press-topdown-v3") for seed in (100_000, 100_001)
    ]
    assert {e["num_steps"] for e in record["episodes"]} == {8}
    assert record["policy"]["features"]["packing"] == "padding_free"
    assert record["env"]["image_size"] == 28
    assert list(record["controls"]) == ["blind", "blank_image", "wrong_prompt"]
    rewards = {name: [e["sum_reward"] for e in record["controls"][name]] for name in record["controls"]}
    rewards["policy"] = [e["sum_reward"] for e in record["episodes"]]
    for name in record["controls"]:
        assert rewards[name] != rewards["policy"], f"{name} did what the policy does"
    assert len(record["videos"]) == 2
    assert all((tmp_path / video).stat().st_size > 0 for video in record["videos"])
    page = (tmp_path / "results.html").read_text()
    assert page.count("data:image/jpeg") == 6
    assert "“Press the button from the top”" in page


def test_the_same_checkpoint_under_two_names_and_other_workers_is_the_same(
    evaluate: Command, run_folder: Path, tmp_path: Path
) -> None:
    pair = f"checkpoint={{first: {run_folder}, again: {run_folder}/checkpoints/last}}"
    code, printed, _ = evaluate(tmp_path, pair, "eval.videos=0", "eval.num_workers=1")
    assert code == 0
    assert "again cannot be told apart from first" in printed
    first, again = results(tmp_path / "first"), results(tmp_path / "again")
    assert_same_episodes(again, first)
    (paired,) = json.loads((tmp_path / "pairs.json").read_text())["pairs"].values()
    assert (paired["num_episodes"], paired["difference"], paired["p_value"]) == (4, 0.0, 1.0)
    code, _, _ = evaluate(tmp_path / "alone", f"checkpoint={run_folder}", "eval.videos=0", "+plugin=embodix")
    assert code == 0
    assert_same_episodes(results(tmp_path / "alone"), first)


def test_an_interrupted_evaluation_is_continued(evaluate: Command, run_folder: Path, tmp_path: Path) -> None:
    evaluate(tmp_path, f"checkpoint={run_folder}", "eval.videos=0", "eval.num_slots=1")
    whole, lines = results(tmp_path), (tmp_path / "episodes.jsonl").read_text().splitlines()
    code, _, error = evaluate(tmp_path, f"checkpoint={run_folder}", "eval.videos=0")
    assert code == 1
    assert f"holds an evaluation already ({tmp_path}/episodes.jsonl). Continue it with resume={tmp_path}" in error
    assert "eval.num_slots=1" in (tmp_path / ".hydra" / "overrides.yaml").read_text(), (
        "a refused command changes nothing"
    )
    folder = tmp_path.with_name(f"{tmp_path.name}_killed")
    shutil.copytree(tmp_path, folder)
    (folder / "results.json").unlink()
    (folder / "episodes.jsonl").write_text(lines[0] + "\n" + lines[1][:20])
    code = dispatch("lerobot", ["eval", f"resume={folder}", f"hydra.run.dir={tmp_path}/hydra"])
    assert code == 0
    continued = results(folder)
    assert continued["settings"]["resumed"]
    assert_same_episodes(continued, whole)
    assert continued["identity"]["model"] == whole["checkpoint"]
    assert len(continued["identity"]["weights"]) == 16


def test_the_expert_checks_the_simulator_without_a_checkpoint(evaluate: Command, tmp_path: Path) -> None:
    code, printed, _ = evaluate(
        tmp_path, "actor=expert", "env=metaworld", "env.task=drawer-close-v3", "env.image_size=28", "eval.videos=0"
    )
    assert code == 0
    assert "2/2 = 100 %" in printed
    assert results(tmp_path)["checkpoint"] is None


def test_upstreams_own_features_are_one_override_away(evaluate: Command, run_folder: Path, tmp_path: Path) -> None:
    code, _, _ = evaluate(
        tmp_path, f"checkpoint={run_folder}", "+plugin=none", "+env.task=reach-v3", "eval.videos=0", "eval.n_episodes=1"
    )
    assert code == 0
    assert results(tmp_path)["policy"]["features"] == {"attention": "upstream dense eager"}
    assert results(tmp_path)["env"]["task"] == "reach-v3"


@pytest.mark.parametrize("computation", ["+plugin=embodix", "+plugin=none"])
def test_a_checkpoint_is_evaluated_in_fp8(
    computation: str, evaluate: Command, run_folder: Path, tmp_path: Path
) -> None:
    few = ["+env.task=reach-v3", "eval.videos=0", "eval.n_episodes=1", computation]
    code, printed, _ = evaluate(tmp_path, f"checkpoint={run_folder}", "quantization=fp8_block", *few)
    assert code == 0
    assert "modules run without FP8 tensor cores (by dequantize)" in printed.replace("\n", " ")
    quantization = results(tmp_path)["policy"]["features"]["quantization"]
    assert {row["kernel"] for row in quantization["converted"]} == {"dequantize"}
    assert all(".language_model.layers." in row["path"] for row in quantization["converted"])
    code, _, _ = evaluate(tmp_path / "plain", f"checkpoint={run_folder}", *few)
    assert code == 0
    (quantized,), (plain,) = results(tmp_path)["episodes"], results(tmp_path / "plain")["episodes"]
    assert quantized["sum_reward"] != plain["sum_reward"]
    assert quantized["sum_reward"] == pytest.approx(plain["sum_reward"], rel=0.05)
    code, _, error = evaluate(tmp_path / "strict", f"checkpoint={run_folder}", "quantization=fp8_block", *few,
                              "quantization.options.strict=true")  # fmt: skip
    assert code == 1
    assert "strict=true, and" in error
    assert "Traceback" not in error


def test_the_wrong_prompt_of_one_task_comes_from_the_training_data(
    evaluate: Command, run_folder: Path, tmp_path: Path
) -> None:
    overrides = ["+env.task=hammer-v3", "eval.videos=0", "controls=[wrong_prompt]", "eval.n_episodes=1"]
    code, printed, _ = evaluate(tmp_path, f"checkpoint={run_folder}", *overrides)
    assert code == 0
    record = results(tmp_path)
    assert "It was told 'Hammer a screw on the wall', which no task of its training data says." in printed
    assert record["controls"]["wrong_prompt"][0]["sum_reward"] != record["episodes"][0]["sum_reward"]


def test_a_mistake_is_said_before_anything_is_loaded(evaluate: Command, run_folder: Path, tmp_path: Path) -> None:
    code, printed, error = evaluate(tmp_path, f"checkpoint={run_folder}", "+env.task=reach")
    assert code == 1
    assert "did you mean reach-v3?" in error
    assert "Traceback" not in error
    assert "Loaded state dict" not in printed


def test_a_sweep_over_checkpoints_ends_in_one_page(
    evaluate: Command, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = f"checkpoint={run_folder},{run_folder}/checkpoints/last"
    code, printed, _ = evaluate(tmp_path, "-m", checkpoints, "eval.videos=0", f"hydra.sweep.dir={tmp_path}/sweep")
    assert code == 0
    assert "1_two_tasks cannot be told apart from 0_two_tasks" in printed
    assert (tmp_path / "sweep" / "results.html").is_file()


def test_one_checkpoint_beside_itself_with_other_settings(run_folder: Path, tmp_path: Path, evaluate: Command) -> None:
    entry = f"{{path: {run_folder}, policy.n_action_steps: %d}}"
    word = f"checkpoint={{one: {entry % 1}, all: {entry % 6}}}"
    simulator = ["env=metaworld", "env.task=reach-v3", "env.image_size=28", "env.episode_length=8"]
    code, printed, errors = evaluate(tmp_path, word, *simulator)
    assert code == 0, errors
    assert "all 6 actions of each chunk are executed before the policy looks again" in " ".join(printed.split())
    changes = {name: results(tmp_path / name)["policy"]["changes"] for name in ("one", "all")}
    assert changes == {"one": ["policy.n_action_steps=1"], "all": ["policy.n_action_steps=6"]}
    assert results(tmp_path / "one")["checkpoint"] == results(tmp_path / "all")["checkpoint"]
    assert json.loads((tmp_path / "pairs.json").read_text())["pairs"]["all"]["num_episodes"] == 2
    assert "one: with" in (tmp_path / "results.html").read_text()
