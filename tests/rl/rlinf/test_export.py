# SPDX-License-Identifier: Apache-2.0
"""What RLinf saved, as a model folder of LeRobot."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from embodix_rl.rlinf.export import export_model


@pytest.fixture
def base(tmp_path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(
        {"model.w": torch.zeros(2, 3, dtype=torch.bfloat16), "model.b": torch.zeros(2)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps({"type": "pi05", "n_action_steps": 5}))
    (folder / "policy_preprocessor.json").write_text("{}")
    return folder


def _trained(**more):
    weights = {"model.w": torch.randn(2, 3), "model.b": torch.randn(2), "model.tied": torch.ones(1), **more}
    return {f"flow.policy.{name}": weight for name, weight in weights.items()} | {"flow.value_head.x": torch.ones(4)}


def test_an_export_has_the_trained_weights_and_everything_else_of_the_base(base, tmp_path):
    weights, checkpoint = _trained(), tmp_path / "global_step_7"
    checkpoint.mkdir()
    folder = export_model(weights, base, checkpoint, num_executed=10)
    exported = load_file(folder / "model.safetensors")
    assert set(exported) == {"model.w", "model.b"}
    assert torch.equal(exported["model.b"], weights["flow.policy.model.b"])
    assert torch.equal(exported["model.w"], weights["flow.policy.model.w"].bfloat16())
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert json.loads((folder / "config.json").read_text()) == {"type": "pi05", "n_action_steps": 10}
    assert (folder / "policy_preprocessor.json").read_text() == "{}"


def test_an_export_replaces_one_that_is_there(base, tmp_path):
    export_model(_trained(), base, tmp_path, 10)
    later = _trained()
    folder = export_model(later, base, tmp_path, 10)
    assert torch.equal(load_file(folder / "model.safetensors")["model.b"], later["flow.policy.model.b"])
    assert [path.name for path in tmp_path.glob("pretrained_model*")] == ["pretrained_model"]


def test_weights_of_another_policy_are_refused_before_anything_is_written(base, tmp_path):
    weights = _trained()
    del weights["flow.policy.model.w"]
    with pytest.raises(ValueError, match=r"1 weights .* model\.w for one"):
        export_model(weights, base, tmp_path, 10)
    assert not list(tmp_path.glob("pretrained_model*"))
