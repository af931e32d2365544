# SPDX-License-Identifier: Apache-2.0
"""A run finds or makes the files that its policy needs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from embodix.config.compose import compose
from embodix.training.host_config import decode_host_config
from embodix_groot import assets
from embodix_groot.assets import prepare_host_assets
from embodix_groot.testing import small_groot_run
from embodix_pi05.testing import small_run


def _prepared(overrides: list[str]) -> Any:
    cfg = compose("train", [*overrides, "train.output_dir=x"])
    host_cfg = decode_host_config(cfg)
    prepare_host_assets(cfg, host_cfg)
    return host_cfg.policy


@pytest.fixture
def nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "prepare_assets", lambda *_: pytest.fail("assets were made"))


def test_assets_stand_in_the_dataset_with_its_instructions(demonstrations: Path) -> None:
    policy = _prepared(small_groot_run(demonstrations))
    folder = Path(policy.tokenizer_assets_repo)
    assert folder.parent == (demonstrations / "groot_n15").resolve()
    assert Path(policy.base_model_path) == folder / assets.BASE_MODEL
    assert (folder / assets.BASE_MODEL / "model.safetensors").is_file()
    assert _prepared(small_groot_run(demonstrations)).tokenizer_assets_repo == str(folder)


def test_a_mixture_has_the_instructions_of_all_members(
    demonstrations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(assets, "prepare_assets", lambda parent, settings: asked.append((parent, settings)) or parent)
    members = (
        f"dataset.members={{a: {{repo_id: x/a, root: {demonstrations}}}, b: {{repo_id: x/b, root: {demonstrations}}}}}"
    )
    single = small_groot_run(demonstrations)
    _prepared([o for o in single if not o.startswith("dataset.")] + ["dataset=mixture", members])
    _prepared(single)
    (parent, mixture), (_, alone) = asked
    assert parent == demonstrations / "groot_n15"
    assert len(mixture.instructions) == 2 * len(alone.instructions)
    assert set(mixture.instructions) == set(alone.instructions)


@pytest.mark.usefixtures("nothing_is_written")
def test_named_assets_are_taken_as_they_are(demonstrations: Path, tmp_path: Path) -> None:
    policy = _prepared(small_groot_run(demonstrations, f"policy.tokenizer_assets_repo={tmp_path}"))
    assert policy.tokenizer_assets_repo == str(tmp_path)


def test_named_assets_that_are_not_there_are_an_error(demonstrations: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer_assets_repo=/nowhere/0 is not there"):
        _prepared(small_groot_run(demonstrations, "policy.tokenizer_assets_repo=/nowhere/0"))


@pytest.mark.usefixtures("nothing_is_written")
def test_other_policies_need_nothing(demonstrations: Path) -> None:
    assert not hasattr(_prepared(small_run(demonstrations)), "tokenizer_assets_repo")
    real = _prepared(["policy=groot_n15", f"dataset.root={demonstrations}"])
    assert real.tokenizer_assets_repo == "lerobot/eagle2hg-processor-groot-n1p5"
    assert real.base_model_path == "nvidia/GR00T-N1.5-3B"


def test_assets_that_were_changed_are_an_error(demonstrations: Path, tmp_path: Path) -> None:
    made = Path(_prepared(small_groot_run(demonstrations)).tokenizer_assets_repo)
    copy = shutil.copytree(made, tmp_path / made.name)
    named = small_groot_run(demonstrations, f"policy.tokenizer_assets_repo={copy}")
    _prepared(named)
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json missing or changed"):
        _prepared(named)
