# SPDX-License-Identifier: Apache-2.0
"""What upstream is given to train adapters, and what is refused before anything is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from embodix.config.compose import compose
from embodix.patching import replace_attribute
from embodix.training import adapters
from embodix.training.adapters import adapter_patches, settle_adapters
from embodix.training.host_config import decode_host_config


def _settled(*overrides: str) -> Any:
    cfg = compose("train", [*overrides, "dataset.root=nowhere", "train.output_dir=run"])
    host_cfg = decode_host_config(cfg)
    settle_adapters(host_cfg, cfg.peft)
    return host_cfg


def test_the_default_trains_every_weight() -> None:
    assert _settled("policy=pi05_small").peft is None


def test_the_group_is_upstreams_config(tmp_path: Path) -> None:
    host_cfg = _settled("policy=pi05_small", "peft=lora", "peft.r=4", f"policy.pretrained_path={tmp_path}")
    assert (host_cfg.peft.method_type, host_cfg.peft.r) == ("LORA", 4)
    assert host_cfg.peft.target_modules is None  # upstream's policy has its own
    assert "lora_alpha" not in vars(host_cfg.peft)  # plain LeRobot decodes what the checkpoint holds


def test_targets_come_from_the_policys_record_unless_they_are_named(tmp_path: Path) -> None:
    groot = ("policy=groot_n15_small", "peft=lora", f"policy.pretrained_path={tmp_path}")
    assert "action_head" in _settled(*groot).peft.target_modules
    assert _settled(*groot, "peft.target_modules=[q_proj]").peft.target_modules == ["q_proj"]


def test_the_base_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    host_cfg = _settled("policy=pi05_small", "peft=lora", "policy.pretrained_path=base")
    assert host_cfg.policy.pretrained_path == tmp_path / "base"
    host_cfg = _settled("policy=pi05_small", "peft=lora", "policy.pretrained_path=owner/name")
    assert str(host_cfg.policy.pretrained_path) == "owner/name"


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ((), r"beside the weights of a trained policy; got policy.pretrained_path=null"),
        (("policy.pretrained_path=x", "peft.method_type=LORRA"), r"peft.method_type must be one of .*LORA.*'LORRA'"),
        (("policy.pretrained_path=x", "peft.method_type=MISS", "peft.lora_alpha=8"), r"scales the adapters of LORA"),
        (("policy.pretrained_path=x", "peft.rank=8"), r"rank.*Did you mean|Known fields: .*target_modules"),
    ],
)
def test_a_mistake_is_told_before_anything_is_built(choices: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _settled("policy=pi05_small", "peft=lora", *(f"+{c}" if ".rank" in c else c for c in choices))


def test_adapters_are_no_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").touch()
    for choice in ("none", "lora"):
        with pytest.raises(ValueError, match=rf"holds adapters, not a policy.*lerobot merge {tmp_path} FOLDER"):
            _settled("policy=pi05_small", f"peft={choice}", f"policy.pretrained_path={tmp_path}")


def test_a_run_that_was_resumed_names_its_adapters(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").touch()
    cfg = compose("train", ["policy=pi05_small", f"policy.pretrained_path={tmp_path}", "train.output_dir=run"])
    host_cfg = decode_host_config(cfg)
    host_cfg.resume = True
    settle_adapters(host_cfg, cfg.peft)
    assert host_cfg.policy is not None and str(host_cfg.policy.pretrained_path) == str(tmp_path)


def test_a_peft_that_cannot_wrap_says_what_it_misses(tmp_path: Path) -> None:
    import peft.import_utils

    def refuse() -> bool:
        raise ImportError("Found an incompatible version of torchao. Found version 0.15.0")

    undo = replace_attribute(peft.import_utils, "is_torchao_available", refuse)
    try:
        with pytest.raises(ValueError, match=r"Found version 0\.15\.0.*pip install 'embodix\[lora\]'"):
            _settled("policy=pi05_small", "peft=lora", f"policy.pretrained_path={tmp_path}")
        assert "torchao" in str(adapters.peft_problem())
    finally:
        undo()


def test_patches_follow_the_group_and_the_checkpoint(tmp_path: Path) -> None:
    lora, full = tmp_path / "lora.json", tmp_path / "full.json"
    lora.write_text(json.dumps({"peft": {"r": 4}}))
    full.write_text(json.dumps({"peft": None}))
    assert adapter_patches(None) == adapter_patches(None, full) == {}
    assert list(adapter_patches(None, lora)) == ["lerobot_peft_resume"]
    scaled = adapter_patches({"r": 4, "lora_alpha": 16})
    assert scaled == {"lerobot_peft_resume": {}, "lerobot_peft_alpha": {"lora_alpha": 16}}
