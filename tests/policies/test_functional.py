# SPDX-License-Identifier: Apache-2.0
"""The shared autograd functions against upstream's own formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lerobot.policies.pi_gemma import PiGemmaRMSNorm
from transformers.models.gemma.modeling_gemma import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from embodix.policies import functional
from embodix.policies.functional import (
    ZERO_GRADIENT,
    GatedGelu,
    GatedSilu,
    RmsNorm,
    Rotate,
    gemma_rms_norm,
    with_zero_gradients,
)
from embodix.testing.errors import relative_error

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


def compare(ours, theirs, inputs, dtype):
    outputs = [call(*inputs) for call in (ours, theirs)]
    slope = torch.randn(outputs[0].shape).to(outputs[0].dtype)
    pairs = zip(*(torch.autograd.grad(output, inputs, slope) for output in outputs), strict=True)
    for got, wanted in [tuple(outputs), *pairs]:
        assert got.dtype == wanted.dtype
        assert relative_error(got, wanted) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype):
    norm = PiGemmaRMSNorm(24)
    weight = torch.randn(24, requires_grad=True)

    def formula(x, w):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (1 + w)).to(x.dtype)

    x = torch.randn(7, 24).to(dtype).requires_grad_()
    compare(lambda x, w: gemma_rms_norm(x, w, 1e-6), formula, (x, weight), dtype)
    norm.weight.data = weight.data
    assert relative_error(gemma_rms_norm(x, weight, norm.eps), norm(x)[0]) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_of_heads_is_qwens(dtype):
    norm = Qwen3RMSNorm(8, eps=1e-6)
    torch.nn.init.normal_(norm.weight)
    norm.to(dtype)
    heads = torch.randn(7, 3, 8).to(dtype).requires_grad_()
    compare(lambda x, w: RmsNorm.apply(x, w, 1e-6), lambda x, _: norm(x), (heads, norm.weight), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_silu(dtype):
    gate, up = ((4 * torch.randn(5, 9)).to(dtype).requires_grad_() for _ in range(2))
    compare(GatedSilu.apply, lambda g, u: F.silu(g) * u, (gate, up), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 9), (2, 5, 9)])
def test_gated_gelu(dtype, shape, monkeypatch):
    monkeypatch.setattr(functional, "CACHED_ELEMENTS", 20)
    gate, up = ((4 * torch.randn(shape)).to(dtype).requires_grad_() for _ in range(2))
    compare(GatedGelu.apply, lambda g, u: F.gelu(g, approximate="tanh") * u, (gate, up), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation(dtype):
    heads = torch.randn(6, 3, 8).to(dtype).requires_grad_()
    angles = torch.randn(6, 4).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    compare(
        lambda x: Rotate.apply(x, cos, sin),
        lambda x: apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=1)[0],
        (heads,),
        dtype,
    )


def test_frozen_inputs_get_no_gradient():
    weight = torch.zeros(4)
    x = torch.randn(3, 4, requires_grad=True)
    gemma_rms_norm(x, weight, 1e-6).sum().backward()
    GatedGelu.apply(torch.randn(3, 4), x).sum().backward()
    GatedSilu.apply(torch.randn(3, 4), x).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_unused_parameters_get_exact_zeros():
    used, unused = torch.randn(3, requires_grad=True), torch.full((2,), float("inf"), requires_grad=True)
    output = with_zero_gradients(used, unused, torch.zeros(1))
    output.sum().backward()
    assert torch.equal(output, used)
    assert unused.grad.tolist() == [0, 0]
    assert used.grad.tolist() == [1, 1, 1]


def test_a_parameter_whose_parts_are_elsewhere_is_told_of_its_gradient_of_zeros():
    told: list[str] = []
    elsewhere = torch.empty(0, requires_grad=True)
    setattr(elsewhere, ZERO_GRADIENT, lambda: told.append("zeros"))
    used = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        with_zero_gradients(used, elsewhere)
    assert told == []
    with_zero_gradients(used, elsewhere).sum().backward()
    assert told == ["zeros"]
    assert elsewhere.grad is None


def test_gated_gelu_of_strided_inputs():
    gate, up = (torch.randn(9, 5).t().requires_grad_() for _ in range(2))
    compare(GatedGelu.apply, lambda g, u: F.gelu(g, approximate="tanh") * u, (gate, up), torch.float32)


def test_gated_gelu_stays_finite_far_out():
    gate = torch.tensor([[-1e10, -50.0, 0.0, 50.0, 1e10]], requires_grad=True)
    output = GatedGelu.apply(gate, torch.ones(1, 5))
    output.sum().backward()
    assert output.tolist() == [[0, 0, 0, 50, pytest.approx(1e10)]]
    assert gate.grad.tolist() == [[0, 0, 0.5, 1, 1]]
