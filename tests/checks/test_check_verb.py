# SPDX-License-Identifier: Apache-2.0
"""`lerobot check` as people use it: exit code, table, JSON and page; the groups `check=`; mixtures; prompts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from embodix.checks.dataset_check import check_data
from embodix.checks.guard import require_sound_data
from embodix.cli import check
from embodix.config.compose import compose
from embodix.testing.damaged_datasets import Damage
from embodix.training.host_config import decode_host_config
from embodix_pi05.testing import small_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the verb on a data set: exit code, what it printed, and its folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lerobot check"])
    monkeypatch.setenv("COLUMNS", "160")

    def run_check(root: Path, *words: str) -> tuple[int, str, Path]:
        options = [word for word in words if word != "--json"]
        flags = [word for word in words if word == "--json"]
        folder = tmp_path / "out"
        shutil.rmtree(folder, ignore_errors=True)
        overrides = [*small_run(root, "tokenizer.directory=null"), f"hydra.run.dir={folder}", *options]
        code = check.run([*overrides, *flags])
        return code, capsys.readouterr().out, folder

    return run_check


def test_a_sound_set_is_said_to_be_sound(run: Any, image_set: Path) -> None:
    code, printed, folder = run(image_set)
    assert code == 0
    assert "3 episodes, 72 frames; nothing to remark." in printed
    assert json.loads((folder / "check.json").read_text())["findings"] == []
    assert "nothing to remark" in (folder / "report.html").read_text()


def test_what_is_wrong_is_named_with_its_place_and_exit_code(run: Any, damaged: Damage) -> None:
    damaged.values("observation.state", 30, 3, float("nan"))
    code, printed, folder = run(damaged.root)
    assert code == check.FOUND_WRONG
    assert "NaN or infinite (episode 1, frame 6, dimension 3) [not_finite]" in printed
    page = (folder / "report.html").read_text()
    assert "not_finite" in page
    assert "episode 1, frame 6, dimension 3" in page


def test_json_is_printed_alone(run: Any, image_set: Path) -> None:
    code, printed, _ = run(image_set, "--json")
    assert code == 0
    assert json.loads(printed)["num_frames"] == 72


def _config(root: Path, *overrides: str) -> Any:
    cfg = compose("train", small_run(root, "tokenizer.directory=null", "train.output_dir=out", *overrides))
    return decode_host_config(cfg), OmegaConf.to_container(cfg, resolve=True)


def test_the_mode_decides_what_is_wrong_enough(damaged: Damage, caplog: pytest.LogCaptureFixture) -> None:
    damaged.values("action", 30, 3, float("inf"))
    with pytest.raises(ValueError, match=r"The data can't be trained on.*\n.*not_finite"):
        require_sound_data(*_config(damaged.root))
    assert require_sound_data(*_config(damaged.root, "check=off")) is None
    report = require_sound_data(*_config(damaged.root, "check=warn"))
    assert report is not None
    assert [finding.kind for finding in report.errors] == ["not_finite"]
    assert "not_finite" in caplog.text


def test_only_the_first_rank_looks(damaged: Damage, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged.values("action", 30, 3, float("inf"))
    monkeypatch.setenv("RANK", "1")
    assert require_sound_data(*_config(damaged.root)) is None


def test_members_of_a_mixture_are_named(image_set: Path, damaged: Damage) -> None:
    damaged.values("observation.state", 30, 2, float("nan"))
    sound, hurt = (f"{{repo_id: a/{root.name}, root: {root}}}" for root in (image_set, damaged.root))
    members = f"dataset.members={{sound: {sound}, hurt: {hurt}}}"
    options = ("tokenizer.directory=null", "train.output_dir=out")
    own = [word for word in small_run(image_set, *options) if not word.startswith("dataset.root")]
    cfg = compose("train", [*own, "dataset=mixture", members])
    report = check_data(decode_host_config(cfg), OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    assert [(finding.dataset, finding.kind) for finding in report.errors] == [("hurt", "not_finite")]
    assert report.num_frames == 144


def test_prompts_are_counted_by_the_tokenizer_of_the_run(image_set: Path, demonstrations: Path) -> None:
    directory = f"tokenizer.directory={demonstrations}/tokenizer"
    reports = [check_data(*_config(image_set, directory, f"policy.tokenizer_max_length={n}")) for n in (200, 12)]
    assert [[finding.kind for finding in report.findings] for report in reports] == [[], ["instruction_long"]]


def test_metadata_alone_are_enough_for_a_plan(damaged: Damage) -> None:
    shutil.rmtree(damaged.root / "data")
    assert require_sound_data(*_config(damaged.root), may_be_absent=True) is not None
    with pytest.raises(ValueError, match="file_missing"):
        require_sound_data(*_config(damaged.root))
