# SPDX-License-Identifier: Apache-2.0
"""A third party's quantizer in every place that takes one: ``lerobot quantize`` and its gate, loading, training."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from embodix import plugins
from embodix.checkpoints.model_folder import find_model
from embodix.checkpoints.policy_loading import PolicyChoices, loaded_policy
from embodix.cli.main import dispatch
from embodix.testing.host_runs import train_here
from embodix.training.host_config import decode_env
from embodix_pi05.testing import small_run

Command = Callable[..., tuple[int, str, str]]
NUM_CONVERTED = 21
GATE = ("--gate", "gate.num_samples=4", "gate.batch_size=2", "+gate.thresholds.step_cosine=0.999")


@pytest.fixture(scope="module", autouse=True)
def registered() -> Any:
    """The plugin, installed as far as embodix can tell."""
    entry_points = [
        *importlib.metadata.entry_points(group=plugins.ENTRY_POINT_GROUP),
        importlib.metadata.EntryPoint("int8_rows", "int8_rows", plugins.ENTRY_POINT_GROUP),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).with_name("int8_plugin"))
        patch.setattr(sys, "argv", ["lerobot"])
        registry = plugins.load_plugins(entry_points)
        registry.require_healthy()
        patch.setattr(plugins, "registry", lambda: registry)
        yield


@pytest.fixture(scope="module")
def run(demonstrations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train_here(small_run(demonstrations, "train.steps=1", f"train.output_dir={folder}", "+plugin=embodix"))
    return folder


@pytest.fixture
def quantize(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Exit code, output and error output of ``lerobot quantize`` in this process."""

    def command(*words: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = dispatch("lerobot", ["quantize", *map(str, words), f"hydra.run.dir={tmp_path / 'command'}"])
        return code, *capsys.readouterr()

    return command


def _actions(checkpoint: Path, *features: str) -> tuple[torch.Tensor, dict[str, Any]]:
    environment = decode_env({"type": "embodix_metaworld", "task": "reach-v3", "image_size": 28})
    with loaded_policy(find_model(checkpoint), environment, PolicyChoices(features=features)) as loaded:
        generator = torch.Generator().manual_seed(0)
        cameras = [name for name in loaded.policy.config.image_features if "empty" not in name]
        observation: dict[str, Any] = {name: torch.rand(2, 3, 28, 28, generator=generator) for name in cameras}
        observation |= {"observation.state": torch.rand(2, 4, generator=generator), "task": ["reach", "press"]}
        torch.manual_seed(1)
        return loaded.policy.predict_action_chunk(loaded.preprocessor(observation)), loaded.description


def test_it_is_quantized_gated_loaded_and_trained_from(
    quantize: Command, run: Path, tmp_path: Path, demonstrations: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code, printed, error = quantize(run, out, "quantization=int8_rows", "unused_heads=drop", *GATE)
    assert code == 0, error
    assert f"{NUM_CONVERTED} modules in int8 (one scale a row)" in printed
    record = json.loads((out / "quantize.json").read_text())
    assert record["gate"]["passed"] is True
    assert record["gate"]["numbers"]["mantissa_bits"] == 6
    assert record["quantization"]["name"] == record["gate"]["recipe"]["name"] == "int8_rows"
    assert record["quantization"]["format"] == {
        "name": "int8",
        "title": "int8 (one scale a row)",
        "sentence": "int8, one scale a row",
        "glossary": {"int8": "A whole number from -127 to 127, times a scale."},
    }
    assert "FP8" not in printed
    assert len(record["quantization"]["converted"]) == NUM_CONVERTED
    assert all(module["sqnr_db"] > 35 for module in record["quantization"]["converted"])
    assert "int8, one scale a row" in (tmp_path / "command" / "quantize.html").read_text()
    weights = load_file(out / "model.safetensors")
    values = [tensor for tensor in weights.values() if tensor.dtype == torch.int8]
    assert len(values) == NUM_CONVERTED
    total = record["sizes"]["total"]
    assert total["bytes_after"] == sum(tensor.nbytes for tensor in weights.values())

    wanted, _ = _actions(run, "quantization=int8_rows")
    got, description = _actions(out)
    assert torch.equal(got, wanted)
    assert not torch.equal(got, _actions(run)[0])
    assert description["features"]["quantization"]["name"] == "int8_rows"
    assert "lerobot_quantized_checkpoint" in description["patches"]
    with pytest.raises(ValueError, match=r"is quantized by int8_rows; quantization=fp8_block can't take its weights"):
        _actions(out, "quantization=fp8_block")

    capsys.readouterr()
    options = ("train.steps=1", f"train.output_dir={tmp_path / 'trained'}", f"policy.pretrained_path={out}")
    assert train_here(small_run(demonstrations, *options)).final_loss > 0
    assert f"holds {NUM_CONVERTED} weights in int8; the policy gets them dequantized" in capsys.readouterr().out
    code, _, error = quantize(out, tmp_path / "again")
    assert code == 1
    assert "is quantized already; give the one that it was made from" in error


def test_what_it_does_not_offer_is_refused_at_once(quantize: Command, run: Path, tmp_path: Path) -> None:
    chosen, out = "quantization=int8_rows", tmp_path / "out"
    for words, message in (
        (["unused_heads=quantize"], "quantization=int8_rows has no option unused_heads"),
        (["export_language_model=true"], "quantization=int8_rows does not export the language model alone"),
        (["quantization.options.embeddings=true"], "int8_rows leaves embeddings as they are"),
    ):
        code, _, error = quantize(run, out, chosen, *words)
        assert code == 1
        assert message in error
    assert not out.exists()


def test_one_without_files_acts_and_is_refused_by_the_command(quantize: Command, run: Path, tmp_path: Path) -> None:
    _, description = _actions(run, "quantization=int8_in_place")
    assert len(description["features"]["quantization"]["converted"]) == NUM_CONVERTED
    code, _, error = quantize(run, tmp_path / "out", "quantization=int8_in_place")
    assert code == 1
    assert "lerobot quantize writes quantization=fp8_block or int8_rows; got int8_in_place, which has no files" in error


def test_a_folder_that_nobody_recognises_names_who_was_asked(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    fields = json.loads((Path(find_model(run).model) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(
        ValueError, match=r"'awq'.*none of the quantizers fp8_block, int8_in_place and int8_rows knows it"
    ):
        find_model(folder).quantizer()
