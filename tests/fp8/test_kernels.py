# SPDX-License-Identifier: Apache-2.0
"""Every kernel against its definition; layouts that torch's own checks accept; choices and fallbacks."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from embodix.testing.errors import relative_error
from embodix_fp8 import kernels
from embodix_fp8.blocks import BLOCK, ScaledWeight, quantize_blocks
from embodix_fp8.kernels import (
    COMPILE_FROM,
    KERNELS,
    EmulatedKernel,
    ScaledMmKernel,
    choose_kernel,
    kernel_problem,
    quantize_rows,
    require_options,
    self_check_error,
)

CPU = torch.device("cpu")
ON_CPU = ["dequantize", "scaled_mm_emulated"]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def no_kept_answers():
    """Probes and self-checks are asked again in this test, and by the next."""
    kernel_problem.cache_clear()
    yield
    kernel_problem.cache_clear()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9), st.integers(1, 300), st.integers(1, 300), st.integers(0, 10**6))
def test_the_emulation_is_the_sum_over_blocks_of_scaled_products(rows, outputs, inputs, seed):
    """What the tensor cores are specified to compute, block by block."""
    x, scaled = drawn(rows, inputs, seed=seed), quantize_blocks(drawn(outputs, inputs, seed=seed + 1))
    rounded = quantize_rows(x)
    wanted = torch.zeros(rows, outputs, dtype=torch.float64)
    for block in range(-(-inputs // 128)):
        columns = slice(128 * block, 128 * (block + 1))
        products = rounded.values[:, columns].double() @ scaled.values[:, columns].double().t()
        weight_scales = scaled.scale_inv[:, block].repeat_interleave(128)[:outputs].double()
        wanted += products * rounded.scale_inv[:, block, None].double() * weight_scales
    got = EmulatedKernel()(x, scaled)
    assert got.dtype == x.dtype
    assert relative_error(got, wanted) < 1e-5


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 9), st.sampled_from([torch.bfloat16, torch.float32]))
def test_torch_accepts_the_layout_of_scales_for_tensor_cores(rows, sixteens, blocks, dtype):
    """The checks that torch makes before it calls cuBLAS, on tensors that pretend to be on a GPU."""
    outputs, inputs = 128 * sixteens, 128 * blocks
    with FakeTensorMode():
        x = torch.empty(rows, inputs, device="cuda", dtype=dtype)
        scales = torch.empty(sixteens, blocks, device="cuda")
        values = torch.empty(outputs, inputs, device="cuda").to(torch.float8_e4m3fn)
        product = ScaledMmKernel()(x, ScaledWeight(values, scales, BLOCK))
    assert (tuple(product.shape), product.dtype) == ((rows, outputs), dtype)


@pytest.mark.parametrize("wrong", ["contiguous scales of activations", "scales of weights without padding"])
def test_torch_refuses_other_layouts(wrong, monkeypatch):
    """The mutation twins of the test above."""
    if wrong.startswith("contiguous"):
        monkeypatch.setattr(torch.Tensor, "t", _contiguous_transpose)
    else:
        monkeypatch.setattr("embodix_fp8.kernels.ROW_MULTIPLE", 1)
    with FakeTensorMode():
        values = torch.empty(256, 640, device="cuda").to(torch.float8_e4m3fn)
        weight = ScaledWeight(values, torch.empty(2, 5, device="cuda"), BLOCK)
        with pytest.raises(Exception, match=r"scale|must be"):
            ScaledMmKernel()(torch.empty(8, 640, device="cuda", dtype=torch.bfloat16), weight)


def _contiguous_transpose(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 1).contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ON_CPU)
def test_kernels_of_this_machine_pass_their_self_check(name, dtype):
    assert kernel_problem(name, CPU, dtype) is None


@pytest.mark.slow
def test_the_compiled_kernel_equals_the_plain_one_in_many_shapes():
    """More shapes than torch compiles of one function by itself."""
    for index in range(10):
        x, scaled = drawn(3, 130 + index), quantize_blocks(drawn(200 + index, 130 + index))
        with torch._dynamo.config.patch(error_on_recompile=False, fail_on_recompile_limit_hit=True):
            assert torch.equal(KERNELS["dequantize_compiled"](x, scaled), KERNELS["dequantize"](x, scaled))


@pytest.mark.parametrize("fault", ["scale of the neighbour", "no scale of activations", "raises"])
def test_the_self_check_notices_a_wrong_kernel(fault, monkeypatch, no_kept_answers):
    class Wrong(EmulatedKernel):
        def __call__(self, rows_MK, weight):
            if fault == "raises":
                raise RuntimeError("no such kernel")
            if fault == "no scale of activations":
                return F.linear(quantize_rows(rows_MK).values.float(), weight.dequantize(torch.float32))
            shifted = ScaledWeight(weight.values, weight.scale_inv.roll(1, 0), weight.block)
            return super().__call__(rows_MK, shifted)

    monkeypatch.setitem(kernels.KERNELS, "wrong", Wrong())
    problem = kernel_problem("wrong", CPU, torch.float32)
    assert problem is not None
    assert ("RuntimeError: no such kernel" if fault == "raises" else "self-check is off by") in problem


def test_a_row_of_small_activations_is_checked_too(monkeypatch):
    """A kernel that is wrong for rows of small magnitude alone."""

    class Coarse(EmulatedKernel):
        def __call__(self, rows_MK, weight):
            product = super().__call__(rows_MK, weight)
            product[0] *= 1.1
            return product

    assert self_check_error(Coarse(), CPU, torch.float32) > 0.05


@pytest.mark.parametrize(
    ("capability", "cuda", "hip", "reason"),
    [
        ((9, 0), "12.9", None, None),
        ((9, 0), "13.0", None, None),
        ((9, 0), "12.8", None, "since CUDA 12.9; this torch is built for 12.8"),
        ((10, 0), "12.9", None, r"compute capability 9\.0 \(Hopper\); a GPU has 10\.0"),
        ((8, 9), "12.9", None, r"a GPU has 8\.9"),
        ((9, 4), None, "6.4", "built for ROCm"),
    ],
)
def test_the_probe_says_where_tensor_cores_multiply_blocks(capability, cuda, hip, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    found = ScaledMmKernel().probe(torch.device("cuda"), torch.bfloat16)
    assert found is None if reason is None else re.search(reason, found)


def test_on_a_cpu_auto_falls_back_and_says_why():
    for activations, kernel in (("auto", "dequantize"), ("fp8", "scaled_mm_emulated")):
        choice = choose_kernel(activations, "auto", CPU, torch.float32, 1000)
        assert choice.of((32, 48)) == (KERNELS[kernel], "there are no FP8 tensor cores on cpu")


def test_what_was_asked_for_is_no_fallback():
    assert choose_kernel("high", "auto", CPU, torch.float32, 1000).of((32, 48)) == (KERNELS["dequantize"], None)
    assert choose_kernel("auto", "dequantize", CPU, torch.float32, 1000).of((32, 48)) == (KERNELS["dequantize"], None)
    assert choose_kernel("fp8", "dequantize", CPU, torch.float32, 1000).of((32, 48))[0] is KERNELS["scaled_mm_emulated"]
    assert choose_kernel("auto", "dequantize_at_load", CPU, torch.float32, 1000).of((32, 48)) == (None, None)


def test_many_weights_are_compiled_where_that_works(monkeypatch):
    for problem, wanted in ((None, "dequantize_compiled"), ("no compiler", "dequantize")):
        monkeypatch.setattr(
            kernels,
            "kernel_problem",
            lambda name, *_, problem=problem: "no GPU" if name == "scaled_mm" else problem,
        )
        assert choose_kernel("auto", "auto", CPU, torch.float32, COMPILE_FROM).kernel is KERNELS[wanted]
        assert choose_kernel("auto", "auto", CPU, torch.float32, COMPILE_FROM - 1).kernel is KERNELS["dequantize"]


def test_shapes_that_tensor_cores_do_not_take_fall_back_one_by_one(monkeypatch):
    monkeypatch.setattr(kernels, "kernel_problem", lambda *_: None)
    choice = choose_kernel("auto", "auto", torch.device("cuda"), torch.bfloat16, 1000)
    assert choice.of((256, 2048)) == (KERNELS["scaled_mm"], None)
    kernel, reason = choice.of((256, 130))
    assert kernel is KERNELS["dequantize"]
    assert "got 130 inputs and 256 outputs" in reason


def test_a_named_kernel_that_cannot_run_is_an_error_with_the_usable_ones():
    with pytest.raises(
        ValueError, match=r"kernel=scaled_mm can't run on cpu.*no FP8 tensor cores.*Usable here: dequantize"
    ):
        choose_kernel("auto", "scaled_mm", CPU, torch.float32, 1000)


@pytest.mark.parametrize(
    ("activations", "kernel", "message"),
    [
        ("fp9", "auto", "activations is one of auto, high, fp8; got 'fp9'"),
        ("auto", "fast", "kernel is one of auto, scaled_mm, dequantize"),
        ("high", "scaled_mm", "kernel=scaled_mm multiplies activations in FP8"),
        ("fp8", "dequantize_compiled", "activations in high precision; got activations=fp8"),
        ("fp8", "dequantize_at_load", "activations in high precision; got activations=fp8"),
    ],
)
def test_options_that_do_not_exist_or_exclude_each_other_are_refused(activations, kernel, message):
    with pytest.raises(ValueError, match=message):
        require_options(activations, kernel)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_activations_that_are_not_finite_stay_so(value):
    x = drawn(3, 200)
    x[1, 5] = value
    got = EmulatedKernel()(x, quantize_blocks(drawn(16, 200)))
    assert torch.isfinite(got).all(dim=1).tolist() == [True, False, True]
