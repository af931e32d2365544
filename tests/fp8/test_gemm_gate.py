# SPDX-License-Identifier: Apache-2.0
"""FP8 is kept layer by layer where the clock says it is faster, and the decisions can be saved and taken again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from embodix_fp8.precision import gemm_gate
from embodix_fp8.precision.block_scaling import EmulatedBlocks
from embodix_fp8.precision.gemm_gate import GemmGate, GemmTable, gate_options, seconds_a_call
from embodix_fp8.precision.linear_layers import install_kernel
from embodix_pi05.testing import random_batch, small_pi05

CPU = torch.device("cpu")
KERNEL = EmulatedBlocks("for the test")


def clock_of(seconds: Iterable[float]) -> Callable[..., float]:
    """A clock that runs what it measures, as a real one does, and gives the next of these times."""
    times = iter(seconds)

    def clock(run: Callable[[], None], device: torch.device) -> float:
        run()
        return next(times)

    return clock


def two_layers() -> tuple[nn.Linear, nn.Module]:
    layer = nn.Linear(32, 16, bias=False)
    return layer, KERNEL.convert(layer)


@pytest.mark.parametrize(("fp8_s", "threshold", "kept"), [(0.9, 1.0, True), (1.0, 1.0, False), (0.9, 1.2, False)])
def test_fp8_is_kept_where_it_is_faster_by_the_threshold(fp8_s: float, threshold: float, kept: bool) -> None:
    gate = GemmGate(CPU, KERNEL.name, threshold=threshold, clock=clock_of([1.0, fp8_s]))
    x = torch.randn(7, 32, requires_grad=True)
    assert gate.keeps(*two_layers(), x)[0] is kept
    (shape,) = gate.describe()["shapes"]
    assert (shape["M"], shape["K"], shape["N"], shape["kept"]) == (7, 32, 16, kept)
    assert shape["speedup"] == pytest.approx(1 / fp8_s)


def test_each_shape_is_timed_once_and_other_gradients_are_another_shape() -> None:
    gate = GemmGate(CPU, KERNEL.name, clock=clock_of([1.0, 2.0, 1.0, 0.5]))
    x = torch.randn(7, 32, requires_grad=True)
    assert [gate.keeps(*two_layers(), x)[0] for _ in range(3)] == [False] * 3
    assert [gate.keeps(*two_layers(), x.detach())[0] for _ in range(3)] == [True] * 3
    assert len(gate.describe()["shapes"]) == 2


def test_timing_leaves_gradients_and_the_random_stream_alone() -> None:
    layer, fp8_layer = two_layers()
    x, state = torch.randn(7, 32, requires_grad=True), torch.get_rng_state()
    GemmGate(CPU, KERNEL.name).keeps(layer, fp8_layer, x)
    assert x.grad is None and layer.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_the_clock_measures_what_it_is_given() -> None:
    calls: list[int] = []
    assert seconds_a_call(lambda: calls.append(1), CPU) > 0
    assert len(calls) == gemm_gate.NUM_WARM_UP + gemm_gate.NUM_TIMED


def test_a_failing_product_is_not_swallowed() -> None:
    layer, _ = two_layers()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        GemmGate(CPU, KERNEL.name).keeps(layer, nn.Linear(8, 8), torch.randn(7, 32))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A table in which FP8 is twice as fast at 100 rows and half as fast at 10."""
    gate = GemmGate(CPU, KERNEL.name, clock=clock_of([1.0, 2.0, 1.0, 0.5]))
    for num_rows in (10, 100):
        gate.keeps(*two_layers(), torch.randn(num_rows, 32))
    assert gate.table is not None
    gate.table.save(tmp_path / "gemm_gate.json")
    return tmp_path / "gemm_gate.json"


@pytest.mark.parametrize(("num_rows", "kept"), [(1, False), (10, False), (54, False), (56, True), (4000, True)])
def test_a_table_decides_by_the_nearest_number_of_rows_without_a_clock(saved: Path, num_rows: int, kept: bool) -> None:
    gate = GemmGate(CPU, KERNEL.name, table=saved, clock=clock_of([]))
    assert gate.keeps(*two_layers(), torch.randn(num_rows, 32))[0] is kept
    assert gate.describe()["table_read_from"] == str(saved)


def test_a_table_of_something_else_is_refused(saved: Path) -> None:
    with pytest.raises(ValueError, match="was timed for blocks, emulated on cpu; this run computes with other on cpu"):
        GemmGate(CPU, "other", table=saved)
    wide = nn.Linear(64, 16, bias=False)
    gate = GemmGate(CPU, KERNEL.name, table=saved)
    with pytest.raises(ValueError, match=r"timings of \(K, N\) \[\(32, 16\)\]; this run has .*K=64"):
        gate.keeps(wide, KERNEL.convert(wide), torch.randn(10, 64))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match=r"torch.float32 timings .* in torch.bfloat16"),
    ):
        gate.keeps(*two_layers(), torch.randn(10, 32))


@pytest.mark.parametrize("content", [None, "no json", "[]", '{"device": "cpu"}', '{"timings": [{"shape": 1}]}'])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "table.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match="is no table of timed products"):
        GemmTable.load(path)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="gemm_gate has the options enabled, table, threshold; got treshold"):
        gate_options({"treshold": 1.0})
    with pytest.raises(ValueError, match="above 0; got 0"):
        GemmGate(CPU, KERNEL.name, threshold=0)


def _trained(policy: Any) -> float:
    torch.manual_seed(0)
    loss, _ = policy.forward(random_batch(policy, [3, 8]))
    loss.backward()
    policy.zero_grad()
    return loss.item()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_first_batch_decides_for_every_layer_of_a_policy(checkpointing: bool) -> None:
    """Products of the gated MLP are faster in FP8 here, those of attention slower."""
    policy = small_pi05(gradient_checkpointing=checkpointing)
    without = _trained(policy)
    fast = {(32, 64), (64, 32)}

    class ByShape(GemmGate):
        def _time(self, layer: nn.Module, input_MK: torch.Tensor) -> float:
            weight = layer.weight
            assert isinstance(weight, torch.Tensor)
            is_fp8 = type(layer) is not nn.Linear
            return 0.5 if is_fp8 == ((weight.shape[1], weight.shape[0]) in fast) else 1.0

    gate = ByShape(CPU, KERNEL.name)
    installation = install_kernel(policy, "pi05", KERNEL, gate)
    before = installation.describe()
    assert before["converted"] == [] and before["gemm_gate"]["shapes"] == []
    with_gate = _trained(policy)
    after = installation.describe()
    assert {module["path"].rpartition(".")[2] for module in after["converted"]} == {"gate_proj", "up_proj", "down_proj"}
    reasons = {module["path"].rpartition(".")[2]: module["reason"] for module in after["skipped"]}
    assert "FP8 is 0.5 times as fast" in reasons["k_proj"]
    assert json.dumps(after)
    assert with_gate != without
    assert _trained(policy) == with_gate
    installation.uninstall()
    assert _trained(policy) == without


def test_layers_that_no_batch_reaches_are_left_as_they_were() -> None:
    policy = small_pi05()
    own = dict(policy.named_modules())
    installation = install_kernel(policy, "pi05", KERNEL, GemmGate(CPU, KERNEL.name))
    assert dict(policy.named_modules()) == own
    assert all(
        "no batch has come by" in m["reason"]
        for m in installation.describe()["skipped"]
        if "layers" in m["path"] and "language_model" in m["path"]
    )
    installation.uninstall()
    assert all("forward" not in module.__dict__ for module in policy.modules() if isinstance(module, nn.Linear))
