# SPDX-License-Identifier: Apache-2.0
"""A weight in FP8 behaves as the module's own: products, look-ups, gradients, moving, copying, saving."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_model
from torch import nn

from embodix.testing.errors import relative_error
from embodix_fp8.block_weight import BlockScaledWeight
from embodix_fp8.blocks import quantize_blocks


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def converted(module: nn.Module, dtype: torch.dtype = torch.float32, kernel: str = "dequantize") -> nn.Module:
    weight = BlockScaledWeight(quantize_blocks(module.weight), dtype, kernel)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


@pytest.fixture
def linear() -> nn.Module:
    """200 outputs of 130 inputs: ragged at both edges."""
    layer = nn.Linear(130, 200, bias=False)
    with torch.no_grad():
        layer.weight.copy_(drawn(200, 130))
    return converted(layer)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 5), st.integers(0, 10**6), st.booleans())
def test_products_and_gradients_are_those_of_the_dequantized_weight(outputs, inputs, rows, seed, bias):
    weight, x = drawn(outputs, inputs, seed=seed), drawn(rows, inputs, seed=seed + 1).requires_grad_()
    b = drawn(outputs, seed=seed + 2) if bias else None
    scaled = quantize_blocks(weight)
    ours = F.linear(x, BlockScaledWeight(scaled, torch.float32, "dequantize"), b)
    dense = scaled.dequantize(torch.float32)
    wanted = F.linear(x, dense, b)
    slope = drawn(rows, outputs, seed=seed + 3)
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    got, expected = (torch.autograd.grad(out, x, slope)[0] for out in (ours, wanted))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_rounded_activations_have_the_gradient_of_the_dequantized_weight():
    """Straight-through: what the tensor cores round forward does not enter the gradient."""
    scaled = quantize_blocks(drawn(48, 256))
    x, slope = drawn(9, 256, seed=1).requires_grad_(), drawn(9, 48, seed=2)
    ours = F.linear(x, BlockScaledWeight(scaled, torch.float32, "scaled_mm_emulated"))
    wanted = F.linear(x, scaled.dequantize(torch.float32))
    assert 1e-3 < relative_error(ours, wanted) < 0.05
    assert torch.equal(torch.autograd.grad(ours, x, slope)[0], torch.autograd.grad(wanted, x, slope)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_read_the_looked_up_rows(dtype):
    table = nn.Embedding(300, 150)
    dense = quantize_blocks(table.weight).dequantize(dtype)
    converted(table, dtype)
    tokens = torch.randint(0, 300, (4, 7), generator=torch.Generator().manual_seed(0))
    assert torch.equal(table(tokens), F.embedding(tokens, dense))
    assert table(torch.empty(0, dtype=torch.long)).shape == (0, 150)


def test_an_embedding_that_rewrites_its_weight_is_refused():
    table = converted(nn.Embedding(300, 150, max_norm=1.0))
    with pytest.raises(ValueError, match="max_norm"):
        table(torch.tensor([1]))


def test_autocast_decides_the_dtype_of_products(linear):
    x = drawn(3, 5, 130, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        got = linear(x)
        wanted = F.linear(x, linear.weight.dequantize(torch.float32))
    assert got.dtype == wanted.dtype == torch.bfloat16
    assert torch.equal(got, wanted)


def test_gradients_flow_through_autocast_in_the_inputs_dtype(linear):
    x = drawn(3, 130, seed=1).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        linear(x).float().sum().backward()
    wanted = linear.weight.dequantize(torch.bfloat16).float().sum(0)
    assert x.grad.dtype == torch.float32
    assert relative_error(x.grad, wanted.expand(3, -1)) < 1e-2


def test_activations_of_another_dtype_are_refused(linear):
    with pytest.raises(ValueError, match=r"dtype torch\.float32; got torch\.bfloat16"):
        linear(drawn(2, 130).bfloat16())
    with pytest.raises(ValueError, match=r"got torch\.float16"), torch.autocast("cpu", torch.float16):
        linear(drawn(2, 130))


def test_who_asks_gets_the_policys_dtype_and_a_parameter(linear):
    assert isinstance(linear.weight, nn.Parameter)
    assert (linear.weight.dtype, tuple(linear.weight.shape)) == (torch.float32, (200, 130))
    assert not linear.weight.requires_grad
    assert sum(parameter.numel() for parameter in linear.parameters()) == 200 * 130
    assert linear.weight.nbytes == 200 * 130 + 4 * 2 * 2


def test_moving_changes_the_dtype_of_products_and_keeps_the_values(linear):
    values = linear.weight.scaled.values.clone()
    linear.to(torch.bfloat16)
    assert isinstance(linear.weight, BlockScaledWeight)
    assert isinstance(linear.weight, nn.Parameter)
    assert linear.weight.dtype == linear(drawn(2, 130).bfloat16()).dtype == torch.bfloat16
    linear.float()
    assert torch.equal(linear.weight.scaled.values.view(torch.uint8), values.view(torch.uint8))
    assert linear.to("meta").weight.scaled.values.is_meta
    with pytest.raises(ValueError, match="float16"):
        linear.half()


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_copies_are_whole_and_separate(linear, copied):
    twin = copied(linear)
    assert isinstance(twin.weight, nn.Parameter)
    before = linear.weight.dequantize()
    assert torch.equal(twin.weight.dequantize(), before)
    twin.weight.scaled.scale_inv.mul_(2)
    assert torch.equal(linear.weight.dequantize(), before)


def test_state_dicts_round_trip(linear):
    file = io.BytesIO()
    torch.save(linear.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    other = converted(nn.Linear(130, 200, bias=False))
    other.load_state_dict(state)
    assert torch.equal(other.weight.dequantize(), linear.weight.dequantize())
    dense = nn.Linear(130, 200, bias=False)
    dense.load_state_dict(state)
    assert torch.equal(dense.weight, linear.weight.dequantize())


def test_weights_written_into_it_are_quantized(linear):
    weight = drawn(200, 130, seed=9)
    linear.load_state_dict({"weight": weight})
    assert torch.equal(linear.weight.dequantize(), quantize_blocks(weight).dequantize(torch.float32))


def test_what_is_not_defined_raises(linear, tmp_path):
    for operation in (lambda w: w + 1, lambda w: w.sum(), lambda w: w.t(), lambda w: w.mul_(2)):
        with pytest.raises(NotImplementedError, match="multiplied, looked up, moved and copied; got aten"):
            operation(linear.weight)
    with pytest.raises(RuntimeError, match="lerobot quantize"):
        save_model(linear, str(tmp_path / "model.safetensors"))
    with pytest.raises(ValueError, match="no gradient"):
        linear.requires_grad_(True)
    assert linear.requires_grad_(False) is linear


def test_compilers_trace_through_it(linear):
    x = drawn(4, 130, seed=2)
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), linear(x), rtol=1e-6, atol=1e-6)
