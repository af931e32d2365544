# SPDX-License-Identifier: Apache-2.0
"""The exported language model in transformers' own ``from_pretrained``: the policy's hidden states."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GemmaForCausalLM, Qwen3ForCausalLM

from embodix.checkpoints.skeleton import policy_skeleton
from embodix.policies.support import support_of
from embodix.quantization.conversion import plan_conversion, write_weights
from embodix.tensor_file import TensorFiles
from embodix_fp8.file_format import CONFIG_KEY, BlockScaledWeights
from embodix_fp8.fp8_block import Fp8BlockQuantizer
from embodix_fp8.language_model_export import ExportedLanguageModel, export_language_model
from embodix_groot.testing import SMALL_ARCHITECTURE as SMALL_GROOT
from embodix_groot.testing import small_groot
from embodix_pi05.testing import SMALL_ARCHITECTURE as SMALL_PI05
from embodix_pi05.testing import small_pi05

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="where it sees a GPU, transformers fetches its FP8 kernels from the hub"
)
CLASSES = {"pi05": GemmaForCausalLM, "groot": Qwen3ForCausalLM}
NUM_LAYERS = 2


def _architecture(policy_type: str, head_dim: int = 128) -> dict[str, Any]:
    """Language models whose linear layers are of whole blocks; with another ``head_dim``, not all."""
    if policy_type == "pi05":
        architecture = copy.deepcopy(SMALL_PI05)
        sizes = {"depth": NUM_LAYERS, "head_dim": head_dim}
        architecture["language"] |= {"width": 128, "mlp_dim": 256, **sizes}
        architecture["action_expert"] |= sizes
        return architecture
    groot: dict[str, Any] = copy.deepcopy(SMALL_GROOT)
    groot["language"] |= {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": NUM_LAYERS,
        "head_dim": head_dim,
    }
    groot["vl_self_attention"] |= {"attention_head_dim": 32}
    return groot


def _policy(policy_type: str, architecture: dict[str, Any], dtype: torch.dtype) -> Any:
    build: Callable[..., Any] = small_pi05 if policy_type == "pi05" else small_groot
    policy = build(architecture).eval()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "language_model" in name and name.endswith("norm.weight"):
                parameter.normal_(std=0.3)  # as if trained
    decoder(policy, policy_type).to(dtype)
    return policy


def decoder(policy: nn.Module, policy_type: str) -> Any:
    return policy.get_submodule(support_of(policy_type).language_model.path)


def _export(
    policy: Any,
    policy_type: str,
    architecture: dict[str, Any],
    folder: Path,
    *,
    embeddings: bool = False,
    **recipe: Any,
) -> ExportedLanguageModel:
    """Through the files, as `lerobot quantize` does it."""
    folder.mkdir(exist_ok=True)
    (folder / "quantized").mkdir()
    save_file({name: tensor.clone() for name, tensor in policy.state_dict().items()}, folder / "model.safetensors")
    skeleton = policy_skeleton(policy.config, architecture)
    with TensorFiles(folder) as source:
        quantizer = Fp8BlockQuantizer(embeddings=embeddings)
        planned = plan_conversion(skeleton, policy_type, quantizer, source.specs, **recipe)
        write_weights(source, planned.plan, folder / "quantized")
    config = {"type": policy_type, CONFIG_KEY: planned.plan.layout.to_json()}
    (folder / "quantized" / "config.json").write_text(json.dumps(config))
    with BlockScaledWeights(folder / "quantized") as weights:
        return export_language_model(skeleton, policy_type, weights, folder / "exported", recipe.get("rest_dtype"))


def _hidden_states(policy: Any, policy_type: str, tokens_BL: Tensor) -> Tensor:
    """Of the policy's own decoder in FP8; π0.5 scales embeddings before it, Gemma within."""
    Fp8BlockQuantizer(activations="high").install(policy, policy_type)
    own = decoder(policy, policy_type)
    embeds_BLD = own.embed_tokens(tokens_BL)
    if policy_type == "pi05":
        embeds_BLD = embeds_BLD * torch.tensor(embeds_BLD.shape[-1] ** 0.5, dtype=embeds_BLD.dtype)
    with torch.no_grad():
        return own(inputs_embeds=embeds_BLD).last_hidden_state


@pytest.mark.parametrize("policy_type", CLASSES)
def test_transformers_computes_the_policys_hidden_states(policy_type: str, tmp_path: Path) -> None:
    architecture = _architecture(policy_type)
    policy = _policy(policy_type, architecture, torch.float32)
    exported = _export(policy, policy_type, architecture, tmp_path)
    assert (exported.architecture, exported.num_quantized, exported.ragged) == (
        CLASSES[policy_type].__name__,
        7 * NUM_LAYERS,
        [],
    )
    tokens_BL = torch.arange(1, 13).reshape(2, 6)
    model, info = CLASSES[policy_type].from_pretrained(exported.folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    exact = decoder(policy, policy_type)(inputs_embeds=decoder(policy, policy_type).embed_tokens(tokens_BL))
    with torch.no_grad():
        theirs = model.model(tokens_BL).last_hidden_state
    ours = _hidden_states(policy, policy_type, tokens_BL)
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    assert (ours - exact.last_hidden_state).abs().max() > 1e-3  # FP8 shows: it is not the original that was compared
    assert isinstance(AutoModelForCausalLM.from_pretrained(exported.folder), CLASSES[policy_type])


@pytest.mark.parametrize("policy_type", CLASSES)
def test_bfloat16_needs_one_call_after_loading(policy_type: str, tmp_path: Path) -> None:
    """On a CPU transformers dequantizes to the scales' float32 and leaves the rest as stored."""
    architecture = _architecture(policy_type)
    policy = _policy(policy_type, architecture, torch.bfloat16)
    exported = _export(policy, policy_type, architecture, tmp_path, rest_dtype=torch.bfloat16)
    tokens_BL = torch.arange(1, 13).reshape(2, 6)
    model = AutoModelForCausalLM.from_pretrained(exported.folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32, torch.bfloat16}
    with pytest.raises(RuntimeError, match="dtype"):
        model(tokens_BL)
    model.to(torch.bfloat16)
    with torch.no_grad():
        theirs = model.model(tokens_BL).last_hidden_state.float()
    ours = _hidden_states(policy, policy_type, tokens_BL).float()
    assert (theirs - ours).norm() / ours.norm() < 0.02


@pytest.mark.parametrize("policy_type", CLASSES)
def test_float32_beside_fp8_needs_none(policy_type: str, tmp_path: Path) -> None:
    architecture = _architecture(policy_type)
    policy = _policy(policy_type, architecture, torch.bfloat16)
    exported = _export(policy, policy_type, architecture, tmp_path, rest_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(exported.folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with torch.no_grad():
        assert model(torch.arange(1, 7)[None]).logits.isfinite().all()


def test_layers_of_incomplete_blocks_stay_in_high_precision(tmp_path: Path) -> None:
    """π0.5's key and value projections have ``head_dim`` rows: of 64, transformers would refuse them."""
    architecture = _architecture("pi05", head_dim=64)
    policy = _policy("pi05", architecture, torch.float32)
    exported = _export(policy, "pi05", architecture, tmp_path)
    ragged = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(NUM_LAYERS) for name in ("k", "v")]
    assert sorted(exported.ragged) == ragged
    assert exported.num_quantized == 5 * NUM_LAYERS
    config = json.loads((exported.folder / "config.json").read_text())
    assert sorted(config[CONFIG_KEY]["modules_to_not_convert"]) == ["lm_head", *ragged]
    tokens_BL = torch.arange(1, 13).reshape(2, 6)
    with torch.no_grad():
        theirs = GemmaForCausalLM.from_pretrained(exported.folder).model(tokens_BL).last_hidden_state
    torch.testing.assert_close(theirs, _hidden_states(policy, "pi05", tokens_BL), rtol=1e-5, atol=1e-5)


def test_a_policy_without_whole_blocks_is_refused(tmp_path: Path) -> None:
    policy = _policy("pi05", SMALL_PI05, torch.float32)
    with pytest.raises(
        ValueError, match=r"takes weights of whole blocks of \(128, 128\) only .* has none: \[\(16, 32\)"
    ):
        _export(policy, "pi05", SMALL_PI05, tmp_path)
    assert not (tmp_path / "exported").exists()


def test_the_layout_is_that_of_fine_grained_fp8(tmp_path: Path) -> None:
    """What vLLM's block mode reads, too: vllm/model_executor/layers/quantization/fp8.py, ``Fp8LinearMethod``."""
    architecture = _architecture("pi05")
    policy = _policy("pi05", architecture, torch.float32)
    exported = _export(policy, "pi05", architecture, tmp_path, embeddings=True, drop_unused_heads=True)
    tensors = load_file(exported.folder / "model.safetensors")
    layer = "model.layers.1.mlp.down_proj.weight"
    assert (tensors[layer].dtype, tensors[layer].shape) == (torch.float8_e4m3fn, (128, 256))
    assert (tensors[f"{layer}_scale_inv"].dtype, tensors[f"{layer}_scale_inv"].shape) == (torch.float32, (1, 2))
    assert tensors["model.embed_tokens.weight"].dtype == exported.dtype == torch.bfloat16
    assert {name.split(".")[1] for name in tensors} == {"layers", "embed_tokens", "norm"}
    config = json.loads((exported.folder / "config.json").read_text())
    assert config["architectures"] == ["GemmaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["num_hidden_layers"] == NUM_LAYERS
    assert config[CONFIG_KEY] == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
