# SPDX-License-Identifier: Apache-2.0
"""The quantizer on small policies: what it converts and reports, what it refuses, and that it leaves no trace."""

from __future__ import annotations

import copy
import json
import logging
from collections import Counter

import pytest
import torch

from embodix_fp8 import fp8_block, kernels
from embodix_fp8.block_weight import BlockScaledWeight
from embodix_fp8.blocks import BLOCK, ScaledWeight, quantize_blocks
from embodix_fp8.fp8_block import Fp8BlockQuantizer
from embodix_fp8.kernels import ScaledMmKernel
from embodix_groot.architecture import PUBLIC_ARCHITECTURE
from embodix_groot.testing import meta_groot, small_groot
from embodix_pi05.testing import meta_pi05, random_batch, small_pi05, upstream_actions

LANGUAGE = "model.paligemma_with_expert.paligemma.model.language_model"
FIRST = f"{LANGUAGE}.layers.0.self_attn.q_proj"
NUM_CONVERTED = 21  # seven projections in three layers
POLICIES = {"pi05": small_pi05, "groot": small_groot}


@pytest.fixture(scope="module")
def policy():
    return small_pi05()


@pytest.fixture(scope="module")
def batch(policy):
    return random_batch(policy, [3, 12, 7])


def weight_of(policy, path):
    return policy.get_submodule(path).weight


@pytest.mark.parametrize("policy_type", POLICIES)
def test_every_module_is_reported_and_all_is_put_back(policy_type):
    policy = POLICIES[policy_type]()
    parameters = dict(policy.named_parameters())
    copies = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    installation = Fp8BlockQuantizer().install(policy, policy_type)
    described = json.loads(json.dumps(installation.describe()))
    assert len(described["converted"]) == NUM_CONVERTED
    assert described["backend"] == {"dequantize": NUM_CONVERTED}
    for row in described["converted"]:
        weight = weight_of(policy, row["path"])
        assert isinstance(weight, BlockScaledWeight)
        assert (list(weight.shape), weight.kernel) == (row["shape"], row["kernel"])
        assert torch.equal(
            weight.dequantize(), quantize_blocks(copies[row["path"] + ".weight"]).dequantize(torch.float32)
        )
    for row in described["skipped"]:
        assert weight_of(policy, row["path"]) is parameters[row["path"] + ".weight"]
    assert described["num_bytes"]["after"] < 0.26 * described["num_bytes"]["before"]
    installation.uninstall()
    restored = dict(policy.named_parameters())
    assert list(restored) == list(parameters)
    assert all(restored[name] is parameters[name] and torch.equal(restored[name], copies[name]) for name in parameters)


def test_embeddings_and_heads_are_asked_for_and_read_by_rows(policy, batch):
    plain = Fp8BlockQuantizer(activations="high").install(policy, "pi05")
    before = upstream_actions(policy, batch)
    plain.uninstall()
    installation = Fp8BlockQuantizer(activations="high", embeddings=True, unused_heads=True).install(policy, "pi05")
    actions = upstream_actions(policy, batch)
    embedding = weight_of(policy, f"{LANGUAGE}.embed_tokens").dequantize()
    assert installation.describe()["backend"] == {"dequantize_rows": 1, "dequantize": NUM_CONVERTED + 1}
    installation.uninstall()
    assert not torch.equal(actions, before)
    installation = Fp8BlockQuantizer(activations="high").install(policy, "pi05")
    table = policy.get_submodule(f"{LANGUAGE}.embed_tokens")
    original, table.weight = table.weight, torch.nn.Parameter(embedding)
    assert torch.equal(upstream_actions(policy, batch), actions)
    table.weight = original
    installation.uninstall()


def test_dequantized_at_load_is_the_same_function_in_ordinary_weights(policy, batch):
    results = []
    for kernel in ("dequantize", "dequantize_at_load"):
        installation = Fp8BlockQuantizer(kernel=kernel).install(policy, "pi05")
        results.append(upstream_actions(policy, batch))
        described = installation.describe()
        assert described["fallback"] is None
        installation.uninstall()
    assert torch.equal(*results)
    assert described["num_bytes"]["after"] == described["num_bytes"]["before"]


def test_rounded_activations_change_the_actions_a_little(policy, batch):
    results = {}
    for activations in ("high", "fp8"):
        installation = Fp8BlockQuantizer(activations=activations).install(policy, "pi05")
        results[activations] = upstream_actions(policy, batch)
        installation.uninstall()
    difference = (results["fp8"] - results["high"]).norm() / results["high"].norm()
    assert 1e-5 < difference < 0.1


def test_a_fallback_is_announced_once_with_its_price(policy, caplog, monkeypatch):
    monkeypatch.setattr(fp8_block, "_announced", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            Fp8BlockQuantizer().install(policy, "pi05").uninstall()
    (message,) = [record.getMessage() for record in caplog.records if "quantization" in record.getMessage()]
    assert "21 of 21 modules run without FP8 tensor cores (by dequantize)" in message
    assert "there are no FP8 tensor cores on cpu" in message
    assert "more time than unquantized ones" in message


def test_strict_refuses_the_fallback_and_changes_nothing(policy):
    original = weight_of(policy, FIRST)
    for activations in ("auto", "fp8"):
        with pytest.raises(ValueError, match=r"strict=true, and 21 of 21 modules run without FP8 tensor cores"):
            Fp8BlockQuantizer(strict=True, activations=activations).install(policy, "pi05")
    assert weight_of(policy, FIRST) is original
    installation = Fp8BlockQuantizer(strict=True, activations="high").install(policy, "pi05")
    assert installation.describe()["fallback"] is None
    installation.uninstall()


def test_modules_of_other_shapes_fall_back_alone(policy, monkeypatch):
    """As on a GPU with FP8 tensor cores: 32 inputs are too few for them."""
    monkeypatch.setattr(kernels, "kernel_problem", lambda *_: None)
    with pytest.raises(ValueError, match=r"takes inputs in multiples of 128.*got 32 inputs and 128 outputs"):
        Fp8BlockQuantizer(strict=True).install(policy, "pi05")
    installation = Fp8BlockQuantizer().install(policy, "pi05")
    backend = Counter(row["kernel"] for row in installation.describe()["converted"])
    assert backend == {"dequantize": 18, "scaled_mm": 3}  # o_proj has 8 heads of 16 channels as inputs
    installation.uninstall()


def test_stored_weights_are_taken_as_they_are(policy, batch):
    """Bit for bit, although they differ from what quantizing the policy's own weights gives."""
    first = Fp8BlockQuantizer().install(policy, "pi05")
    stored = {
        row["path"]: ScaledWeight(weight.values.clone(), weight.scale_inv * 1.25, BLOCK)
        for row in first.describe()["converted"]
        for weight in [weight_of(policy, row["path"]).scaled]
    }
    first.uninstall()
    installation = Fp8BlockQuantizer().install(policy, "pi05", stored=stored)
    for path, wanted in stored.items():
        found = weight_of(policy, path).scaled
        assert torch.equal(found.values.view(torch.uint8), wanted.values.view(torch.uint8))
        assert torch.equal(found.scale_inv, wanted.scale_inv)
    installation.uninstall()
    for change, message in (
        (lambda kept: kept.pop(FIRST), r"1 module\(s\) that the checkpoint has in high precision"),
        (
            lambda kept: kept.update({"model.action_in_proj": kept[FIRST]}),
            r"1 module\(s\) in FP8 that the options leave",
        ),
        (
            lambda kept: kept.update({FIRST: quantize_blocks(torch.ones(4, 4))}),
            r"the checkpoint has \(4, 4\) in blocks",
        ),
    ):
        wrong = dict(stored)
        change(wrong)
        with pytest.raises(ValueError, match=message):
            Fp8BlockQuantizer().install(policy, "pi05", stored=wrong)


def test_originals_may_be_given_up():
    policy = small_pi05()
    installation = Fp8BlockQuantizer().install(policy, "pi05", keep_originals=False)
    quantized = weight_of(policy, FIRST)
    installation.uninstall()
    assert weight_of(policy, FIRST) is quantized
    with pytest.raises(ValueError, match="quantized already"):
        Fp8BlockQuantizer().install(policy, "pi05")


def test_a_quantized_policy_is_copied_and_moved(policy, batch):
    installation = Fp8BlockQuantizer().install(policy, "pi05")
    twin = copy.deepcopy(policy)
    wanted = upstream_actions(policy, batch)
    installation.uninstall()
    assert torch.equal(upstream_actions(twin, batch), wanted)
    assert weight_of(twin.to(torch.bfloat16), FIRST).dtype == torch.bfloat16


def test_weights_that_are_not_finite_are_named_and_nothing_is_left(policy):
    path = f"{LANGUAGE}.layers.2.mlp.up_proj"
    original = weight_of(policy, FIRST)
    kept = weight_of(policy, path).detach().clone()
    with torch.no_grad():
        weight_of(policy, path)[1, 2] = float("nan")
    with pytest.raises(ValueError, match=rf"{path}\.weight: Only finite values"):
        Fp8BlockQuantizer().install(policy, "pi05")
    assert weight_of(policy, FIRST) is original
    with torch.no_grad():
        weight_of(policy, path).copy_(kept)


def test_float16_and_unknown_options_are_refused():
    policy = small_pi05()
    policy.model.action_in_proj.half()
    with pytest.raises(ValueError, match=r"float16 is not quantized.*action_in_proj\.weight"):
        Fp8BlockQuantizer().install(policy, "pi05")
    with pytest.raises(ValueError, match="kernel is one of auto"):
        Fp8BlockQuantizer(kernel="fast")
    with pytest.raises(ValueError, match=r"groot and pi05; got policy\.type=act"):
        Fp8BlockQuantizer().install(policy, "act")


@pytest.mark.parametrize("policy_type", ["pi05", "groot"])
def test_at_the_real_size_tensor_cores_take_every_converted_layer(policy_type):
    """No block is ragged, and the bytes of a quarter of float32 and the scales are what is left."""
    policy = meta_pi05() if policy_type == "pi05" else meta_groot(PUBLIC_ARCHITECTURE)
    installation = Fp8BlockQuantizer(activations="high").install(policy, policy_type)
    described = installation.describe()
    installation.uninstall()
    shapes = [tuple(row["shape"]) for row in described["converted"]]
    assert all(ScaledMmKernel().shape_problem(shape) is None for shape in shapes)
    num_weights = sum(rows * columns for rows, columns in shapes)
    assert described["num_bytes"]["after"] == num_weights + 4 * num_weights // 128**2
    assert num_weights == {"pi05": 1_981_808_640, "groot": 603_979_776}[policy_type]
