# SPDX-License-Identifier: Apache-2.0
"""Quantized model folders: what is written is read to the bit, and whatever does not fit is refused by name."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from embodix.quantization.accuracy import sqnr_db
from embodix.quantization.conversion import ConversionPlan, write_weights
from embodix.tensor_file import (
    DIGESTS_FILE,
    WEIGHTS_FILE,
    FileFormatError,
    TensorFiles,
    TensorFileWriter,
)
from embodix_fp8 import blocks
from embodix_fp8.blocks import FLOAT8, quantize_blocks
from embodix_fp8.file_format import (
    CONFIG_FILE,
    CONFIG_KEY,
    BlockConfig,
    BlockScaledWeights,
    is_quantized,
    modules_left_out,
)

CONVERTED = "model.layers.0.mlp"
CONFIG = BlockConfig(modules_to_not_convert=("model.vision", "head"))


def _source_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "layers.0.mlp.weight": torch.randn(200, 300, generator=generator),  # ragged in both directions
        "layers.0.mlp.bias": torch.randn(200, generator=generator),
        "vision.weight": torch.randn(7, 5, generator=generator, dtype=torch.float64).to(torch.bfloat16),
        "steps": torch.arange(3),
        "head.weight": torch.randn(10, 4, generator=generator),
    }


def _plan(**changes: Any) -> ConversionPlan:
    fields: dict[str, Any] = {
        "names": {f"model.{name}": name for name in _source_tensors()},
        "convert": {CONVERTED: torch.float32},
        "drop": ("model.head.weight",),
        "rest_dtype": None,
        "layout": CONFIG,
        **changes,
    }
    return ConversionPlan(**fields)


@pytest.fixture
def source(tmp_path: Path) -> TensorFiles:
    (tmp_path / "source").mkdir()
    save_file(_source_tensors(), tmp_path / "source" / WEIGHTS_FILE)
    return TensorFiles(tmp_path / "source")


@pytest.fixture
def folder(tmp_path: Path, source: TensorFiles) -> Path:
    """A quantized model folder."""
    folder = tmp_path / "quantized"
    folder.mkdir()
    write_weights(source, _plan(), folder)
    _write_config(folder, CONFIG.to_json())
    return folder


def _write_config(folder: Path, fields: Any) -> None:
    (folder / CONFIG_FILE).write_text(json.dumps({"type": "pi05", CONFIG_KEY: fields}))


def _change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Another file with these tensors put in or (None) left out, and without digests."""
    kept = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS_FILE).items()}
    changed = {name: tensor for name, tensor in {**kept, **tensors}.items() if tensor is not None}
    save_file(changed, folder / WEIGHTS_FILE)
    (folder / DIGESTS_FILE).unlink(missing_ok=True)


def test_what_is_written_is_read_to_the_bit(folder: Path) -> None:
    tensors = _source_tensors()
    wanted = quantize_blocks(tensors["layers.0.mlp.weight"])
    with BlockScaledWeights(folder) as weights:
        (stored,) = weights.stored().values()
        assert list(weights.modules) == [CONVERTED]
        assert torch.equal(stored.values.view(torch.uint8), wanted.values.view(torch.uint8))
        assert torch.equal(stored.scale_inv, wanted.scale_inv)
        assert stored.scale_inv.shape == (2, 3)
        assert stored.block == (128, 128)
        state = dict(weights.state(torch.bfloat16))
    assert list(state) == sorted(f"model.{name}" for name in tensors)
    assert torch.equal(state[f"{CONVERTED}.weight"], wanted.dequantize(torch.bfloat16))
    for name in ("layers.0.mlp.bias", "vision.weight", "steps"):
        assert state[f"model.{name}"].dtype == tensors[name].dtype
        assert torch.equal(state[f"model.{name}"], tensors[name])
    assert torch.equal(state["model.head.weight"], torch.zeros(10, 4))


def test_the_file_is_the_layout_of_fine_grained_fp8(folder: Path) -> None:
    loaded = load_file(folder / WEIGHTS_FILE)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in loaded.items() if "mlp.weight" in name} == {
        f"{CONVERTED}.weight": (FLOAT8, (200, 300)),
        f"{CONVERTED}.weight_scale_inv": (torch.float32, (2, 3)),
    }
    assert json.loads((folder / CONFIG_FILE).read_text())[CONFIG_KEY] == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.vision", "head"],
    }
    assert is_quantized(folder)


def test_other_tensors_take_the_dtype_that_is_asked_for(tmp_path: Path, source: TensorFiles) -> None:
    write_weights(source, _plan(rest_dtype=torch.bfloat16, drop=()), tmp_path)
    loaded = load_file(tmp_path / WEIGHTS_FILE)
    assert {name: tensor.dtype for name, tensor in loaded.items()} == {
        f"{CONVERTED}.weight": FLOAT8,
        f"{CONVERTED}.weight_scale_inv": torch.float32,
        "model.layers.0.mlp.bias": torch.bfloat16,
        "model.vision.weight": torch.bfloat16,
        "model.head.weight": torch.bfloat16,
        "model.steps": torch.int64,
    }


def test_a_weight_is_quantized_in_the_dtype_of_the_policy(tmp_path: Path, source: TensorFiles) -> None:
    write_weights(source, _plan(convert={CONVERTED: torch.bfloat16}), tmp_path)
    wanted = quantize_blocks(_source_tensors()["layers.0.mlp.weight"].bfloat16())
    loaded = load_file(tmp_path / WEIGHTS_FILE)
    assert torch.equal(loaded[f"{CONVERTED}.weight"].view(torch.uint8), wanted.values.view(torch.uint8))
    assert torch.equal(loaded[f"{CONVERTED}.weight_scale_inv"], wanted.scale_inv)
    assert not torch.equal(wanted.scale_inv, quantize_blocks(_source_tensors()["layers.0.mlp.weight"]).scale_inv)


def test_each_converted_module_is_told(tmp_path: Path, source: TensorFiles) -> None:
    told: list[tuple[str, float]] = []
    write_weights(
        source,
        _plan(),
        tmp_path,
        lambda path, weight, scaled: told.append(
            (path, ((weight - scaled.dequantize(weight.dtype)).norm() / weight.norm()).item())
        ),
    )
    ((path, error),) = told
    assert path == CONVERTED
    assert 0.02 < error < 0.03


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    tensors = _source_tensors()
    tensors["layers.0.mlp.weight"][0, 0] = float("inf")
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    (tmp_path / "out").mkdir()
    with TensorFiles(tmp_path) as files, pytest.raises(ValueError, match=rf"Tensor {CONVERTED}\.weight can't be"):
        write_weights(files, _plan(), tmp_path / "out")


def test_a_full_disk_leaves_no_digests(tmp_path: Path, source: TensorFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    write = TensorFileWriter.write

    def fill_up(self: TensorFileWriter, name: str, tensor: torch.Tensor) -> None:
        if name.endswith(".bias"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, name, tensor)

    monkeypatch.setattr(TensorFileWriter, "write", fill_up)
    with pytest.raises(OSError, match="No space left"):
        write_weights(source, _plan(), tmp_path)
    assert not (tmp_path / DIGESTS_FILE).exists()


MLP = f"{CONVERTED}.weight"
FAULTS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "scale missing": ({f"{MLP}_scale_inv": None}, rf"Tensor {MLP} of .* is in FP8 and has no {MLP}_scale_inv"),
    "scale of nothing": ({"x.weight_scale_inv": torch.ones(1, 1)}, r"Tensor x.weight_scale_inv .* x.weight is missing"),
    "scale of a bfloat16 weight": (
        {"model.vision.weight_scale_inv": torch.ones(1, 1)},
        r"Tensor model.vision.weight_scale_inv of .* model.vision.weight is BF16",
    ),
    "scale of another shape": (
        {f"{MLP}_scale_inv": torch.ones(3, 2)},
        rf"Tensor {MLP}_scale_inv of .* must be F32 \(2, 3\) .*; got F32 \(3, 2\)",
    ),
    "scale of another dtype": (
        {f"{MLP}_scale_inv": torch.ones(2, 3, dtype=torch.bfloat16)},
        rf"Tensor {MLP}_scale_inv .*; got BF16 \(2, 3\)",
    ),
    "weight is no matrix": (
        {MLP: torch.zeros(200, 300, 1).to(FLOAT8)},
        rf"Tensor {MLP} of .* must be a matrix; got \(200, 300, 1\)",
    ),
    "values in another float8": (
        {MLP: torch.zeros(200, 300).to(torch.float8_e5m2)},
        rf"Tensor {MLP}_scale_inv of .* {MLP} is F8_E5M2",
    ),
    "FP8 that is no weight": ({"model.bias": torch.zeros(4).to(FLOAT8)}, r"Tensor model.bias of .* is in FP8"),
    "nothing in FP8": ({MLP: None, f"{MLP}_scale_inv": None}, "no tensor is in FP8"),
    "a module that the config leaves out": (
        {"model.vision.2.weight": torch.zeros(2, 2).to(FLOAT8), "model.vision.2.weight_scale_inv": torch.ones(1, 1)},
        r"says that model.vision.2 is not quantized .* tensor model.vision.2.weight is in FP8",
    ),
    "scale not finite": (
        {f"{MLP}_scale_inv": torch.full((2, 3), float("nan"))},
        rf"Tensor {MLP}_scale_inv of .* negative or not finite",
    ),
    "scale negative": ({f"{MLP}_scale_inv": -torch.ones(2, 3)}, rf"Tensor {MLP}_scale_inv of .* negative"),
    "value not finite": (
        {MLP: torch.full((200, 300), 0xFF, dtype=torch.uint8).view(FLOAT8)},
        rf"Tensor {MLP} of .* not finite",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_by_name(folder: Path, fault: str) -> None:
    tensors, message = FAULTS[fault]
    _change(folder, **tensors)
    with pytest.raises(FileFormatError, match=message):
        BlockScaledWeights(folder).stored()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**CONFIG.to_json(), "quant_method": "awq"}, "must say quant_method fp8 .* got 'awq'"),
        ({**CONFIG.to_json(), "activation_scheme": "static"}, "got 'fp8' and 'static'"),
        ({**CONFIG.to_json(), "weight_block_size": [128]}, r"two whole numbers; got \[128\]"),
        ({**CONFIG.to_json(), "weight_block_size": None}, "two whole numbers; got None"),
        ({**CONFIG.to_json(), "weight_block_size": [64, 64]}, "is not what the weights were written with"),
        ({"quant_method": "fp8"}, "must be a mapping with activation_scheme"),
        (None, "has no quantization_config"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(folder: Path, fields: Any, message: str) -> None:
    _write_config(folder, fields)
    with pytest.raises(FileFormatError, match=message):
        BlockScaledWeights(folder)


def test_another_block_size_does_not_fit_the_scales(folder: Path) -> None:
    """Of a file that keeps no copy of its config, as others write them."""
    _change(folder)
    _write_config(folder, {**CONFIG.to_json(), "weight_block_size": [64, 64]})
    with pytest.raises(FileFormatError, match=rf"{MLP}_scale_inv of .* must be F32 \(4, 5\) .* blocks of \(64, 64\)"):
        BlockScaledWeights(folder)


def test_a_quantized_file_is_known_without_its_config(folder: Path, source: TensorFiles) -> None:
    (folder / CONFIG_FILE).write_text('{"type": "pi05"}')
    assert is_quantized(folder)
    with pytest.raises(FileFormatError, match="has no quantization_config"):
        BlockScaledWeights(folder)
    assert not is_quantized(source.folder)


def test_modules_left_out_are_named_by_the_shortest_beginning() -> None:
    converted = ["m.text.layers.1.q", "m.text.layers.1.v"]
    skipped = ["m.vision.layers.0.q", "m.vision.layers.1.q", "m.text.head", "m.text.layers.10.q"]
    assert modules_left_out(skipped, converted) == ("m.vision", "m.text.head", "m.text.layers.10")
    with pytest.raises(ValueError, match="is the beginning of a converted one's"):
        modules_left_out(["m.text.layers.1"], converted)


@pytest.mark.parametrize("shape", [(200, 300), (128, 128), (1000, 130), (5, 7)])
def test_some_rows_at_a_time_give_the_same(
    shape: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights too large to be quantized at once are taken in rows of blocks."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    wanted = quantize_blocks(weight)
    monkeypatch.setattr(blocks, "NUM_WEIGHTS_AT_A_TIME", 2 * 128 * 130)
    save_file({"x.weight": weight}, tmp_path / WEIGHTS_FILE)
    plan = ConversionPlan({"x.weight": "x.weight"}, {"x": torch.float32}, (), None, BlockConfig())
    (tmp_path / "out").mkdir()
    noise: list[float] = []
    with TensorFiles(tmp_path) as source:
        write_weights(source, plan, tmp_path / "out", lambda _, weight, scaled: noise.append(scaled.sqnr_db(weight)))
    _write_config(tmp_path / "out", BlockConfig().to_json())
    with BlockScaledWeights(tmp_path / "out") as weights:
        stored = weights.stored_weight("x")
    assert torch.equal(stored.values.view(torch.uint8), wanted.values.view(torch.uint8))
    assert torch.equal(stored.scale_inv, wanted.scale_inv)
    assert noise == [pytest.approx(sqnr_db(weight, wanted.dequantize(torch.float32)))]


def test_a_weight_of_zeros_is_exact() -> None:
    zeros = torch.zeros(3, 4)
    assert quantize_blocks(zeros).sqnr_db(zeros) == float("inf")
