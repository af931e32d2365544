# SPDX-License-Identifier: Apache-2.0
"""Block-scaled FP8 products against a computation by hand, element by element."""

from __future__ import annotations

import pytest
import torch

from embodix_fp8.precision.block_scaling import BlockRoundedLinear, BlockRoundedProduct, rounded


def to_e4m3(value: float) -> float:
    """The nearest of e4m3's 126 positive numbers, ties to the even one, sign kept."""
    codes = [code / 8 * 2.0**-6 for code in range(8)]  # subnormal, step 2**-9
    codes += [(1 + code / 8) * 2.0**exponent for exponent in range(-6, 9) for code in range(8)]
    codes = [code for code in codes if code <= 448]
    index = min(range(len(codes)), key=lambda i: (abs(codes[i] - abs(value)), i % 2))
    return codes[index] if value >= 0 else -codes[index]


def by_hand(matrix: list[list[float]], rows: int, columns: int) -> list[list[float]]:
    """Round a matrix to e4m3 with one scale for every ``rows x columns`` of it."""
    out = [list(row) for row in matrix]
    for top in range(0, len(matrix), rows):
        for left in range(0, len(matrix[0]), columns):
            places = [
                (i, j)
                for i in range(top, min(top + rows, len(matrix)))
                for j in range(left, min(left + columns, len(matrix[0])))
            ]
            scale = max(abs(matrix[i][j]) for i, j in places) / 448
            for i, j in places:
                out[i][j] = to_e4m3(matrix[i][j] / scale) * scale
    return out


@pytest.fixture
def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, weight and slope with ragged blocks in every dimension, over four orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    shapes = (130, 132), (129, 132), (130, 129)
    draws = [torch.randn(shape, generator=generator) for shape in shapes]
    return tuple(d * torch.logspace(-2, 2, d.shape[1]) for d in draws)  # type: ignore[return-value]


def test_every_operand_is_rounded_in_its_own_blocks_along_what_is_summed_over(operands) -> None:
    x, weight, slope = operands
    ours_x, ours_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = BlockRoundedProduct.apply(ours_x, ours_weight)
    out.backward(slope)

    def hand(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return torch.tensor(by_hand(matrix.tolist(), rows, columns), dtype=torch.float64)

    rounded_weight = hand(weight, 128, 128)
    wanted = {
        "output": (out, hand(x, 1, 128) @ rounded_weight.T),
        "input's gradient": (ours_x.grad, hand(slope, 1, 128) @ rounded_weight),
        "weight's gradient": (ours_weight.grad, hand(slope, 128, 1).T @ hand(x, 128, 1)),
    }
    for name, (got, by_hand_) in wanted.items():
        assert got is not None
        error = float((got.detach().double() - by_hand_).norm() / by_hand_.norm())
        assert error < 1e-6, f"{name}: {error}"
        exact = {"output": x @ weight.T, "input's gradient": slope @ weight, "weight's gradient": slope.T @ x}[name]
        assert 1e-3 < float((got.detach().double() - exact).norm() / exact.norm()) < 0.1, name


def test_rounding_is_the_identity_for_gradients() -> None:
    """Straight-through: what FP8 holds exactly passes unchanged, and so do its gradients."""
    x = torch.tensor([[448.0, 1.0, -3.5, 0.25]], requires_grad=True)
    weight = torch.tensor([[448.0, 2.0, 0.5, -16.0]], requires_grad=True)
    BlockRoundedProduct.apply(x, weight).sum().backward()
    assert torch.equal(x.grad, weight.detach())
    assert torch.equal(weight.grad, x.detach())


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    x, weight = torch.randn(3, 16, requires_grad=True), torch.randn(8, 16)
    BlockRoundedProduct.apply(x, weight).sum().backward()
    assert x.grad is not None and weight.grad is None


def test_what_is_not_finite_becomes_nan_in_its_block_and_nowhere_else() -> None:
    values = torch.ones(2, 256)
    values[0, 3] = float("inf")
    got = rounded(values, (1, 128))
    assert got[0, 3].isnan()
    assert torch.equal(got[1], torch.ones(256)) and torch.equal(got[0, 128:], torch.ones(128))


def test_the_layer_takes_any_leading_dimensions_and_honours_autocast() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 8)
    twin = BlockRoundedLinear.of(layer)
    assert twin.weight is layer.weight and twin.bias is layer.bias
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(twin(x), layer(x), rtol=0.1, atol=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        assert twin(x).dtype == layer(x).dtype == torch.bfloat16
        twin(x).sum().backward()
    assert layer.weight.grad.dtype == torch.float32
