# SPDX-License-Identifier: Apache-2.0
"""What is remembered of an operation is what it does: the same shapes, the same memory, the same count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodix.contracts import SampleShape
from embodix.costs import counting, operations
from embodix.costs.operations import run_operation
from embodix.costs.policy_costs import EMBODIX, UPSTREAM, PolicyCosts
from embodix.patching import replace_attribute
from embodix.training.flops import flop_counter
from embodix_groot import testing as groot
from embodix_pi05 import testing as pi05

CAMERA = {"observation.images.front": {"type": "VISUAL", "shape": [3, 28, 28]}}
STATE = {"observation.state": {"type": "STATE", "shape": [4]}}
ACTION = {"action": {"type": "ACTION", "shape": [4]}}
SMALL: dict[str, tuple[dict[str, Any], Any]] = {
    "pi05": (
        {"type": "pi05", "image_resolution": [28, 28], "chunk_size": 6, "n_action_steps": 3, "empty_cameras": 1},
        pi05.SMALL_ARCHITECTURE,
    ),
    "groot": (
        {"type": "groot", "image_size": [28, 28], "chunk_size": 6, "n_action_steps": 3, "tune_llm": True},
        groot.SMALL_ARCHITECTURE,
    ),
}


def _counts(policy: str) -> list[Any]:
    fields, architecture = SMALL[policy]
    patches = {"lerobot_groot_runs": {}} if policy == "groot" else {}
    costs = PolicyCosts(fields, {**CAMERA, **STATE}, ACTION, architecture, patches)
    return [costs.count(SampleShape(1, 7), computation, 2) for computation in (UPSTREAM, EMBODIX)]


def _with_torchs_counter(func: Any, args: Any, kwargs: Any) -> tuple[Any, int]:
    """Each operation run, and counted by torch's own counter."""
    with flop_counter() as counter:
        out = func(*args, **kwargs)
    return out, counter.get_total_flops()


@pytest.mark.parametrize("policy", list(SMALL))
def test_counts_are_those_of_torchs_own_counter(policy: str) -> None:
    remembered = _counts(policy)
    undo = replace_attribute(counting, "run_operation", _with_torchs_counter)
    try:
        assert _counts(policy) == remembered
    finally:
        undo()
    assert remembered[0] != remembered[1]


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_a_repeated_operation_gives_new_tensors_of_the_same_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "_results", {})
    mm, x = torch.ops.aten.mm.default, _meta(5, 3)
    first, again = (run_operation(mm, (x.t(), x), {}) for _ in range(2))
    assert first[1] == again[1] == 2 * 3 * 5 * 3
    assert (again[0].shape, again[0].stride(), again[0].dtype) == (first[0].shape, first[0].stride(), first[0].dtype)
    assert again[0].untyped_storage()._cdata != first[0].untyped_storage()._cdata
    assert again[0].untyped_storage().nbytes() == 3 * 3 * 4


def test_what_shares_memory_is_not_remembered_as_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """``_unsafe_view`` returns a view and does not say so."""
    monkeypatch.setattr(operations, "_results", {})
    x = _meta(4, 6)
    for _ in range(3):
        out, _ = run_operation(torch.ops.aten._unsafe_view.default, (x, [24]), {})
        assert out.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_what_is_written_into_its_argument_returns_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "_results", {})
    for _ in range(3):
        x = _meta(4, 6)
        out, flops = run_operation(torch.ops.aten.addmm_.default, (x, _meta(4, 5), _meta(5, 6)), {})
        assert out is x
        assert flops == 2 * 4 * 5 * 6


def test_equal_numbers_of_other_types_are_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "_results", {})
    add, x = torch.ops.aten.add.Tensor, _meta(3, dtype=torch.int64)
    dtypes = [run_operation(torch.ops.aten.mul.Scalar, (x, value), {})[0].dtype for value in (1, 1.0, 1, 1.0)]
    assert dtypes == [torch.int64, torch.float32, torch.int64, torch.float32]
    on_host = torch.ones((), dtype=torch.float32)
    assert run_operation(add, (_meta(3), on_host), {})[0].shape == (3,)
    assert not [key for key in operations._results if key[0] is add]
