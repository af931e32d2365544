# SPDX-License-Identifier: Apache-2.0
"""FSDP2 and tensor parallel on gloo ranks against one process that goes through the batches of all of them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_cases import CASES, Trained, train_alone

pytestmark = pytest.mark.slow

RANK = Path(__file__).with_name("mesh_rank.py")
HYBRID, HALF = {"shard": 2}, {"size": 2}
TWO_RANKS = [  # label, policy, strategy, options, variant
    ("pi05-tensor", "pi05", "tensor", {}, "plain"),
    ("groot-tensor", "groot", "tensor", {}, "plain"),
    ("pi05-tensor-checkpointed", "pi05", "tensor", {}, "checkpointed"),
    ("groot-tensor-micro", "groot", "tensor", {}, "micro_batches"),
    ("pi05-fsdp2", "pi05", "fsdp2", {}, "plain"),
    ("groot-fsdp2", "groot", "fsdp2", {}, "plain"),
    ("pi05-fsdp2-micro", "pi05", "fsdp2", {}, "micro_batches"),
    ("pi05-watched", "pi05", "fsdp2", {}, "watched"),
    ("groot-watched", "groot", "fsdp2", {}, "watched"),
    ("pi05-kept", "pi05", "fsdp2", {}, "kept_gathered"),
    ("pi05-unaveraged", "pi05", "fsdp2", {}, "unaveraged"),
    ("pi05-unshared", "pi05", "tensor", {}, "unshared_keys_values"),
    ("groot-unsummed", "groot", "tensor", {}, "unsummed_norms"),
]
CUT_TWICE = {**HALF, "shard": 2}
FOUR_RANKS = [
    *(
        (f"{policy}-{name}", policy, strategy, options, "plain")
        for policy in CASES
        for name, strategy, options in (
            ("fsdp2", "fsdp2", {}),
            ("hybrid", "fsdp2", HYBRID),
            ("tensor-data", "tensor", HALF),
            ("tensor-shard", "tensor", CUT_TWICE),
        )
    ),
    ("pi05-tensor-shard-micro", "pi05", "tensor", CUT_TWICE, "micro_batches"),
    ("groot-tensor-shard-resumed", "groot", "tensor", CUT_TWICE, "resumed"),
]
EXACT_AT_TWO = {  # label -> batches of a step
    "pi05-tensor": 1,
    "groot-tensor": 1,
    "pi05-tensor-checkpointed": 1,
    "groot-tensor-micro": 2,
    "pi05-fsdp2": 2,
    "groot-fsdp2": 2,
    "pi05-fsdp2-micro": 4,
}
BATCHES_AT_FOUR = {
    "fsdp2": 4,
    "hybrid": 4,
    "tensor-data": 2,
    "tensor-shard": 2,
    "tensor-shard-micro": 4,
    "tensor-shard-resumed": 2,
}

Results = Mapping[str, dict[str, Any]]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _train(TWO_RANKS, 2, tmp_path_factory.mktemp("two_ranks"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _train(FOUR_RANKS, 4, tmp_path_factory.mktemp("four_ranks"))


def _train(plans: list[Any], num_ranks: int, folder: Path) -> Results:
    (folder / "plans.json").write_text(json.dumps(plans))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    command = [sys.executable, *launcher, str(RANK), str(folder / "plans.json"), str(folder)]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    return {label: torch.load(folder / f"{label}.pt", weights_only=False) for label, *_ in plans}


@functools.cache
def alone(policy: str, num_batches: int) -> Trained:
    return train_alone(CASES[policy], num_batches)


def is_zero_but_for_rounding(name: str) -> bool:
    """Softmax does not see what is added to all keys alike: the gradient of their bias is zero."""
    return name.endswith(".attn1.to_k.bias") or (".vision_model.encoder." in name and name.endswith(".k_proj.bias"))


def deviations(label: str, done: Mapping[str, Any], num_batches: int) -> list[str]:
    """Where a run is not that of one process, over the steps that it has made."""
    reference = alone(label.partition("-")[0], num_batches)
    found = [
        f"{what} of step {step}: {got} for {expected}"
        for what in ("losses", "norms")
        for step, (got, expected) in enumerate(zip(done[what], getattr(reference, what), strict=False))
        if abs(got - expected) > (1e-6 if what == "losses" else 1e-5) * abs(expected)
    ]
    found += _tensor_deviations("gradient", done["gradients"], reference.gradients, 1e-5)
    if len(done["losses"]) == len(reference.losses) and done["parameters"]:
        found += _tensor_deviations("parameter", done["parameters"], reference.parameters, 1e-4)
    return found


def _tensor_deviations(what: str, got: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> list[str]:
    found = [f"{what}s of other names"] if not set(expected) <= set(got) else []
    for name, tensor in expected.items():
        own = got.get(name)
        if (own is None) != (tensor is None):
            found.append(f"{what} {name}: {own} for {tensor}")
        elif tensor is not None and is_zero_but_for_rounding(name):
            found += [f"{what} {name}: no zero"] if what == "gradient" and max(own.norm(), tensor.norm()) > 1e-6 else []
        elif tensor is not None and (own - tensor).norm() > tolerance * tensor.norm():
            found.append(f"{what} {name}: {float((own - tensor).norm() / tensor.norm())}")
    return found


def share_of_bytes(label: str, done: Mapping[str, Any], num_batches: int) -> float:
    """Parameters and optimizer state of a rank, over those of one process."""
    gradients = alone(label.partition("-")[0], num_batches).gradients.values()
    state = sum(2 * gradient.numel() * gradient.element_size() for gradient in gradients if gradient is not None)
    placed = done["placed"]
    return float(placed["held"] + placed["optimizer"]) / float(placed["total"] + state)


@pytest.mark.parametrize("label", EXACT_AT_TWO)
def test_two_ranks_train_as_one_process(two_ranks: Results, label: str) -> None:
    assert len(two_ranks[label]["losses"]) == 5
    assert deviations(label, two_ranks[label], EXACT_AT_TWO[label]) == []


@pytest.mark.parametrize("label", [label for label, *_ in FOUR_RANKS])
def test_four_ranks_train_as_one_process(four_ranks: Results, label: str) -> None:
    assert len(four_ranks[label]["losses"]) == 5
    assert deviations(label, four_ranks[label], BATCHES_AT_FOUR[label.partition("-")[2]]) == []


@pytest.mark.parametrize(
    ("label", "most"), [("pi05-fsdp2", 0.55), ("groot-fsdp2", 0.55), ("pi05-tensor", 0.6), ("groot-tensor", 0.6)]
)
def test_two_ranks_share_parameters_and_optimizer(two_ranks: Results, label: str, most: float) -> None:
    assert 0.5 <= share_of_bytes(label, two_ranks[label], EXACT_AT_TWO[label]) <= most


@pytest.mark.parametrize("policy", CASES)
def test_layers_cut_twice_take_a_quarter(four_ranks: Results, policy: str) -> None:
    label = f"{policy}-tensor-shard"
    assert 0.25 <= share_of_bytes(label, four_ranks[label], 2) <= 0.3


@pytest.mark.parametrize("label", ["pi05-watched", "groot-watched"])
def test_a_unit_or_two_are_gathered_at_a_time(two_ranks: Results, label: str) -> None:
    gathered = two_ranks[label]["gathered"]
    assert all(1 <= most <= 2 for most in gathered.values()), gathered


def test_units_that_are_kept_are_counted(two_ranks: Results) -> None:
    assert two_ranks["pi05-kept"]["gathered"]["forward"] > 2


def test_gradients_of_a_unit_that_are_not_averaged_show(two_ranks: Results) -> None:
    found = deviations("pi05-unaveraged", two_ranks["pi05-unaveraged"], 2)
    assert any("language_model.layers.0" in line for line in found)


def test_without_the_sum_behind_keys_and_values_the_second_step_is_another(two_ranks: Results) -> None:
    found = deviations("pi05-unshared", two_ranks["pi05-unshared"], 1)
    assert any(line.startswith("losses of step 1") for line in found)
    assert not any(line.startswith("losses of step 0") for line in found)


def test_norms_of_all_heads_without_the_sum_show(two_ranks: Results) -> None:
    found = deviations("groot-unsummed", two_ranks["groot-unsummed"], 1)
    assert any("q_norm" in line for line in found) and any("k_norm" in line for line in found)
