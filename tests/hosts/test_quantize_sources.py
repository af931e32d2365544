# SPDX-License-Identifier: Apache-2.0
"""``lerobot quantize`` on checkpoints as they come: in shards, of a mixture, from the hub, under openpi's names."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.configs.policies import PreTrainedConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GemmaForCausalLM

from embodix.checkpoints import model_folder
from embodix.checkpoints.model_folder import ModelFolder
from embodix.cli.main import dispatch
from embodix_fp8.file_format import CONFIG_KEY, BlockScaledWeights, is_quantized
from embodix_pi05.testing import SMALL_ARCHITECTURE, small_pi05

Quantize = Callable[..., Path]
Model = tuple[Path, dict[str, Tensor]]
NUM_CONVERTED = 7  # one decoder layer


def _architecture() -> dict[str, Any]:
    """Linear layers of whole blocks, as the real ones are."""
    architecture = copy.deepcopy(SMALL_ARCHITECTURE)
    sizes = {"depth": 1, "head_dim": 128}
    architecture["language"] |= {"width": 128, "mlp_dim": 128, **sizes}
    architecture["action_expert"] |= sizes
    return architecture


@pytest.fixture(scope="module")
def tensors() -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    policy = small_pi05(_architecture())
    return policy.config, {name: tensor.clone() for name, tensor in policy.state_dict().items()}


@pytest.fixture
def model(tensors: tuple[PreTrainedConfig, dict[str, Tensor]], tmp_path: Path) -> Model:
    """A model folder and its tensors, of one file."""
    config, state = tensors
    folder = tmp_path / "model"
    folder.mkdir()
    config._save_pretrained(folder)
    (folder / "embodix_architecture.json").write_text(json.dumps(_architecture()))
    save_file(state, folder / "model.safetensors")
    return folder, state


@pytest.fixture
def quantize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Quantize:
    """Quantize into a folder that is returned."""
    monkeypatch.setattr(sys, "argv", ["lerobot"])

    def run(source: Path | str, name: str, *overrides: str) -> Path:
        words = [str(source), str(tmp_path / name), f"hydra.run.dir={tmp_path / 'command'}", *overrides]
        assert dispatch("lerobot", ["quantize", *words]) == 0, capsys.readouterr().err
        return tmp_path / name

    return run


def _same_weights(one: Path, other: Path) -> bool:
    return (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def test_shards_give_the_same_file(quantize: Quantize, model: Model, tmp_path: Path) -> None:
    folder, state = model
    whole = quantize(folder, "whole")
    places = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(state)}
    for file in sorted(set(places.values())):
        save_file({name: state[name] for name in state if places[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    sharded = quantize(folder, "sharded")
    assert _same_weights(sharded, whole)
    assert {path.name for path in sharded.iterdir()} == {path.name for path in whole.iterdir()}


def test_names_of_openpi_are_mapped_as_upstream_does(quantize: Quantize, model: Model) -> None:
    folder, state = model
    whole = quantize(folder, "whole")
    renamed = {
        name.removeprefix("model.").replace("time_mlp_", "action_time_mlp_", 1): tensor
        for name, tensor in state.items()
    }
    save_file({**renamed, "state_proj.weight": torch.zeros(2)}, folder / "model.safetensors")
    assert _same_weights(quantize(folder, "openpi"), whole)


def test_a_checkpoint_of_another_architecture_is_refused(
    quantize: Quantize, model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = model
    architecture = _architecture()
    architecture["language"]["mlp_dim"] = 256
    (folder / "embodix_architecture.json").write_text(json.dumps(architecture))
    assert dispatch("lerobot", ["quantize", str(folder), str(tmp_path / "out"), f"hydra.run.dir={tmp_path / 'c'}"]) == 1
    error = capsys.readouterr().err
    assert "layers.0.mlp.gate_proj.weight: checkpoint (128, 128), policy (256, 128)" in error
    (folder / "embodix_architecture.json").write_text(json.dumps(_architecture()))
    save_file({"model.other": torch.zeros(1)}, folder / "model.safetensors")
    assert dispatch("lerobot", ["quantize", str(folder), str(tmp_path / "out"), f"hydra.run.dir={tmp_path / 'c'}"]) == 1
    error = capsys.readouterr().err
    assert "The checkpoint's tensors are not those of its policy." in error
    assert "unexpected (1):\n    model.other" in error


def test_every_member_of_a_mixture_is_quantized(quantize: Quantize, model: Model) -> None:
    folder, _ = model
    member = folder / "embodiments" / "arm"
    member.mkdir(parents=True)
    (member / "config.json").write_text((folder / "config.json").read_text())
    (member / "model.safetensors").symlink_to(Path("..") / ".." / "model.safetensors")
    out = quantize(folder, "out")
    member = out / "embodiments" / "arm"
    assert is_quantized(member)
    assert (member / "model.safetensors").resolve() == out / "model.safetensors"
    with BlockScaledWeights(member) as weights:
        assert len(weights.stored()) == NUM_CONVERTED
    data = bytearray((out / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (out / "model.safetensors").write_bytes(data)
    with BlockScaledWeights(member) as weights, pytest.raises(ValueError, match="is damaged: its bytes changed"):
        weights.stored()


def test_a_model_on_the_hub_is_downloaded(quantize: Quantize, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = model
    monkeypatch.setattr(model_folder, "snapshot_download", lambda name: {"owner/name": str(folder)}[name])
    assert _same_weights(quantize("owner/name", "from_hub"), quantize(folder, "from_folder"))


def test_a_quantized_model_on_the_hub_says_how_to_go_on(
    quantize: Quantize, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = quantize(model[0], "out")
    read = PreTrainedConfig.from_pretrained
    monkeypatch.setattr(PreTrainedConfig, "from_pretrained", lambda _: read(out))
    with pytest.raises(ValueError, match=r"is quantized; download it \(hf download owner/name --local-dir FOLDER"):
        ModelFolder("owner/name", Path("owner/name")).policy_type()


def test_a_quantized_folder_is_not_quantized_again(
    quantize: Quantize, model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = quantize(model[0], "out")
    assert dispatch("lerobot", ["quantize", str(out), str(tmp_path / "again"), f"hydra.run.dir={tmp_path / 'c'}"]) == 1
    assert "is quantized already; give the one that it was made from" in capsys.readouterr().err


def test_a_head_that_the_file_leaves_out_stays_out(quantize: Quantize, model: Model) -> None:
    """As upstream's own files may, where it is tied to the embeddings."""
    folder, state = model
    head = "model.paligemma_with_expert.paligemma.lm_head.weight"
    save_file({name: tensor for name, tensor in state.items() if name != head}, folder / "model.safetensors")
    out = quantize(folder, "out", "unused_heads=quantize")
    assert json.loads((out / "embodix_overrides.json").read_text())[-1] == "quantization.options.unused_heads=false"
    assert head not in load_file(out / "model.safetensors")


@pytest.mark.skipif(torch.cuda.is_available(), reason="transformers would fetch FP8 kernels from the hub")
@pytest.mark.parametrize("place", ["within", "elsewhere"])
def test_the_language_model_is_exported(quantize: Quantize, model: Model, tmp_path: Path, place: str) -> None:
    folder = tmp_path / "out" / "language_model" if place == "within" else tmp_path / "decoder"
    chosen = "true" if place == "within" else str(folder)
    out = quantize(model[0], "out", f"export_language_model={chosen}", "rest_dtype=float32")
    record = json.loads((out / "quantize.json").read_text())
    assert record["language_model"] == {
        "folder": str(folder),
        "architecture": "GemmaForCausalLM",
        "num_quantized": NUM_CONVERTED,
        "in_high_precision": [],
        "dtype": "float32",
    }
    loaded, info = GemmaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    with BlockScaledWeights(out) as weights:
        (prefix,) = {name.partition(".layers.")[0] for name in weights.modules}
        wanted = weights.stored_weight(f"{prefix}.layers.0.mlp.up_proj").dequantize(torch.float32)
    assert torch.equal(loaded.model.layers[0].mlp.up_proj.weight, wanted)
    config = json.loads((out / "config.json").read_text())
    assert CONFIG_KEY in config
