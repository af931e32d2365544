# SPDX-License-Identifier: Apache-2.0
"""``lerobot quantize``: a folder that evaluates to the bit as its source quantized on loading, and trains."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class
from safetensors.torch import load_file

from embodix.checkpoints.model_folder import find_model
from embodix.checkpoints.policy_loading import PolicyChoices, loaded_policy
from embodix.checkpoints.skeleton import WeightLoadError
from embodix.cli.main import dispatch
from embodix.patching import patched
from embodix.policies.support import sizes_patch
from embodix.testing.host_runs import train_here
from embodix.training.host_config import decode_env
from embodix_fp8.block_weight import BlockScaledWeight
from embodix_groot.testing import small_groot_run
from embodix_pi05.testing import small_run

pytestmark = pytest.mark.slow
Command = Callable[..., tuple[int, str, str]]
RUNS: dict[str, Callable[..., list[str]]] = {"pi05": small_run, "groot": small_groot_run}
NUM_CONVERTED = 21  # seven linear layers in each of three decoder layers
LANGUAGE_MODEL = {
    "pi05": "model.paligemma_with_expert.paligemma.model.language_model",
    "groot": "_groot_model.backbone.eagle_model.language_model.model",
}
HEADS = {
    "pi05": [f"model.paligemma_with_expert.{part}.lm_head.weight" for part in ("gemma_expert", "paligemma")],
    "groot": ["_groot_model.backbone.eagle_model.language_model.lm_head.weight"],
}


@pytest.fixture(scope="module")
def runs(demonstrations: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of one step of each policy."""
    folder = tmp_path_factory.mktemp("runs")
    for policy_type, overrides in RUNS.items():
        output = f"train.output_dir={folder / policy_type}"
        train_here(overrides(demonstrations, "train.steps=1", output, "+plugin=embodix"))
    return {policy_type: folder / policy_type for policy_type in RUNS}


@pytest.fixture
def quantize(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Exit code, output and error output of ``lerobot quantize`` in this process."""
    monkeypatch.setattr(sys, "argv", ["lerobot"])

    def run(*words: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = dispatch("lerobot", ["quantize", *map(str, words), f"hydra.run.dir={tmp_path / 'command'}"])
        return code, *capsys.readouterr()

    return run


def _environment() -> Any:
    return decode_env({"type": "embodix_metaworld", "task": "reach-v3", "image_size": 28})


def _actions(checkpoint: Path, *features: str) -> tuple[torch.Tensor, dict[str, Any], dict[str, torch.Tensor]]:
    """A chunk of actions on a fixed observation, the description and the quantized weights' values."""
    with loaded_policy(find_model(checkpoint), _environment(), PolicyChoices(features=features)) as loaded:
        generator = torch.Generator().manual_seed(0)
        cameras = [name for name in loaded.policy.config.image_features if "empty" not in name]
        observation: dict[str, Any] = {name: torch.rand(2, 3, 28, 28, generator=generator) for name in cameras}
        observation["observation.state"] = torch.rand(2, 4, generator=generator)
        observation["task"] = ["reach the goal", "press the button"]
        torch.manual_seed(1)
        chunk = loaded.policy.predict_action_chunk(loaded.preprocessor(observation))
        weights = {
            name: torch.cat(
                [weight.scaled.values.view(torch.uint8).flatten(), weight.scaled.scale_inv.view(torch.uint8).flatten()]
            )
            for name, weight in loaded.policy.named_parameters()
            if isinstance(weight, BlockScaledWeight)
        }
        return loaded.postprocessor(chunk), loaded.description, weights


@pytest.mark.parametrize("policy_type", RUNS)
def test_the_folder_acts_to_the_bit_as_its_source_quantized_on_loading(
    quantize: Command, runs: dict[str, Path], tmp_path: Path, policy_type: str
) -> None:
    code, printed, error = quantize(runs[policy_type], tmp_path / "out", "unused_heads=drop")
    assert code == 0, error
    assert f"{NUM_CONVERTED} modules in FP8" in printed
    wanted, _, of_source = _actions(runs[policy_type], "quantization=fp8_block")
    got, description, of_file = _actions(tmp_path / "out")
    assert torch.equal(got, wanted)
    assert list(of_file) == list(of_source)
    assert len(of_file) == NUM_CONVERTED
    assert all(torch.equal(of_file[name], of_source[name]) for name in of_file)
    assert description["features"]["quantization"]["name"] == "fp8_block"
    assert "lerobot_quantized_checkpoint" in description["patches"]
    exact, _, _ = _actions(runs[policy_type])
    assert not torch.equal(got, exact)
    dequantized, description, weights = _actions(tmp_path / "out", "quantization=none")
    assert weights == {}
    assert "quantization" not in description["features"]
    torch.testing.assert_close(dequantized, got, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy_type", RUNS)
def test_what_the_folder_holds(quantize: Command, runs: dict[str, Path], tmp_path: Path, policy_type: str) -> None:
    out = tmp_path / "out"
    code, _, error = quantize(
        runs[policy_type], out, "unused_heads=drop", "rest_dtype=bfloat16", "quantization.options.embeddings=true"
    )
    assert code == 0, error
    source = find_model(runs[policy_type])
    copied = {path.name for path in Path(source.model).iterdir()}
    assert {path.name for path in out.iterdir()} == copied | {"quantize.json", "tensor_digests.json"}
    tensors, before = load_file(out / "model.safetensors"), load_file(Path(source.model) / "model.safetensors")
    scales = {name for name in tensors if name.endswith("_scale_inv")}
    assert set(tensors) - scales == set(before) - set(HEADS[policy_type])
    quantized = {name.removesuffix("_scale_inv") for name in scales}
    assert len(quantized) == NUM_CONVERTED + 1
    assert all(name.startswith(LANGUAGE_MODEL[policy_type]) for name in quantized)
    for name in set(tensors) - scales:
        assert tensors[name].dtype == (torch.float8_e4m3fn if name in quantized else torch.bfloat16), name
    record = json.loads((out / "quantize.json").read_text())
    assert record == json.loads((tmp_path / "command" / "quantize.json").read_text())
    quantization = record["quantization"]
    assert sorted(f"{module['path']}.weight" for module in quantization["converted"]) == sorted(quantized)
    assert all(25 < module["sqnr_db"] < 40 for module in quantization["converted"])
    assert [tensor["name"] for tensor in quantization["dropped"]] == HEADS[policy_type]
    assert {module["kind"] for module in quantization["skipped"]} >= {"vision", "connector", "action_head"}
    total = record["sizes"]["total"]
    assert total["bytes_before"] == sum(tensor.nbytes for tensor in before.values())
    assert total["bytes_after"] == sum(tensor.nbytes for tensor in tensors.values())
    assert find_model(out).overrides[-3:] == [
        "quantization=fp8_block",
        "quantization.options.embeddings=true",
        "quantization.options.unused_heads=false",
    ]
    got, description, _ = _actions(out)
    assert got.isfinite().all()
    assert description["features"]["quantization"]["embeddings"] is True


@pytest.mark.parametrize("policy_type", RUNS)
def test_plain_upstream_refuses_the_folder(
    quantize: Command, runs: dict[str, Path], tmp_path: Path, policy_type: str
) -> None:
    assert quantize(runs[policy_type], tmp_path / "out")[0] == 0
    with pytest.raises(Exception, match="quantization_config"):
        PreTrainedConfig.from_pretrained(tmp_path / "out")


def test_what_plain_upstream_does_without_the_config(
    quantize: Command, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `lerobot-train --policy.type=... --policy.pretrained_path=...`: GR00T stops; π0.5 prints and goes on, unless
    the guard `patches.lerobot_pi05_strict_load` makes that an error."""

    def load() -> None:
        get_policy_class(policy_type).from_pretrained(out, config=config)

    for policy_type, run in runs.items():
        out, source = tmp_path / policy_type, find_model(run)
        assert quantize(run, out)[0] == 0
        config = PreTrainedConfig.from_pretrained(source.model)
        repairs = {"groot": {"lerobot_groot_runs": {}}, "pi05": {}}[policy_type]
        with patched({sizes_patch(policy_type): {"architecture": source.architecture}, **repairs}):
            if policy_type == "groot":
                with pytest.raises(RuntimeError, match="weight_scale_inv"):
                    load()
                continue
            capsys.readouterr()
            load()
            assert "Warning: Could not load state dict" in capsys.readouterr().out
            with patched({"lerobot_pi05_strict_load": {}}), pytest.raises(WeightLoadError, match="weight_scale_inv"):
                load()


@pytest.mark.parametrize("policy_type", RUNS)
def test_training_starts_from_dequantized_weights(
    quantize: Command,
    runs: dict[str, Path],
    tmp_path: Path,
    demonstrations: Path,
    capsys: pytest.CaptureFixture[str],
    policy_type: str,
) -> None:
    out, run = tmp_path / "out", tmp_path / "run"
    assert quantize(runs[policy_type], out, "unused_heads=drop")[0] == 0
    trained = train_here(
        RUNS[policy_type](demonstrations, "train.steps=1", f"train.output_dir={run}", f"policy.pretrained_path={out}")
    )
    said = capsys.readouterr().out
    assert said.count(f"holds {NUM_CONVERTED} weights in FP8") == 1
    assert f"Filled with zeros, as nothing reads them and the file left them out: {HEADS[policy_type][0]}" in said
    assert trained.final_loss > 0
    model = find_model(run)
    assert model.quantizer() is None
    weights = load_file(Path(model.model) / "model.safetensors")
    converted = json.loads((out / "quantize.json").read_text())["quantization"]["converted"]
    assert {weights[f"{module['path']}.weight"].dtype for module in converted} == {torch.float32}
    before = load_file(Path(find_model(runs[policy_type]).model) / "model.safetensors")
    name = f"{converted[0]['path']}.weight"
    assert 0 < (weights[name] - before[name]).norm() / before[name].norm() < 0.2


def test_a_damaged_folder_stops_evaluation_and_training(
    quantize: Command, runs: dict[str, Path], tmp_path: Path, demonstrations: Path
) -> None:
    out = tmp_path / "out"
    assert quantize(runs["pi05"], out)[0] == 0
    data = bytearray((out / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (out / "model.safetensors").write_bytes(data)
    damaged = rf"Tensor {LANGUAGE_MODEL['pi05']}\.layers\.\S+\.weight of .* is damaged"
    with pytest.raises(ValueError, match=damaged):
        _actions(out)
    overrides = small_run(demonstrations, f"train.output_dir={tmp_path / 'run'}", f"policy.pretrained_path={out}")
    with pytest.raises(ValueError, match=damaged):
        train_here(overrides)
    with pytest.raises(ValueError, match=damaged):
        train_here([*overrides, "patches=none"])


def test_a_sweep_over_options_writes_a_folder_each(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantize: Command
) -> None:
    words = ("-m", "quantization.options.embeddings=true,false", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    code, printed, error = quantize(runs["pi05"], tmp_path / "out", *words)
    assert code == 0, error
    table = printed[printed.index("Bytes of the weights, by job") :]
    cells = [[cell.strip() for cell in line.split("│")] for line in table.splitlines() if line.startswith("│")]
    assert [row[2] for row in cells if row[2]] == ["22", "21"]
    assert "embeddings=False" in "".join(row[1] for row in cells)
    sizes = [(tmp_path / "out" / str(job) / "model.safetensors").stat().st_size for job in (0, 1)]
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("policy_type", RUNS)
def test_the_gate_is_passed_before_anything_is_written(
    quantize: Command, runs: dict[str, Path], tmp_path: Path, policy_type: str
) -> None:
    out, few = tmp_path / "out", ("gate.num_samples=4", "gate.batch_size=2")
    code, _, error = quantize(runs[policy_type], out, "--gate", *few, "+gate.thresholds.chunk_cosine=1.1")
    assert code == 1
    assert "The accuracy gate failed, so nothing was written:" in error
    assert "cosine of the action chunk" in error
    assert not [path for path in tmp_path.iterdir() if path.name != "command"]
    measured = json.loads((tmp_path / "command" / "quantize.json").read_text())
    assert measured["gate"]["passed"] is False
    assert (tmp_path / "command" / "quantize.html").is_file()
    # A policy of one step has small denoising velocities, beside which rounding is larger than in a trained one.
    rules = ("+gate.thresholds.step_cosine=0.999", "+gate.thresholds.action_rms_error=0.1")
    lenient = (*rules, "quantization.options.activations=high")
    code, printed, error = quantize(runs[policy_type], out, "--gate", *few, *lenient)
    assert code == 0, error
    assert "Accuracy gate passed" in printed
    record = json.loads((out / "quantize.json").read_text())
    assert record["gate"]["passed"] is True
    assert record["gate"]["recipe"]["activations"] == record["quantization"]["options"]["activations"] == "high"
    assert "quantization.options.activations=high" in find_model(out).overrides


def test_the_language_model_is_not_exported_without_whole_blocks(
    quantize: Command, runs: dict[str, Path], tmp_path: Path
) -> None:
    code, _, error = quantize(runs["groot"], tmp_path / "out", "export_language_model=true")
    assert code == 1
    assert "takes weights of whole blocks of (128, 128) only" in error
    assert not [path for path in tmp_path.iterdir() if path.name != "command"]
