# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO trains what one process trains, holds a part, and hands its state to other strategies."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_cases import CASES, train_alone

from embodix.contracts import PolicySupport, RankLayout, RunTraits

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed (pip install 'embodix[deepspeed]')",
)
LOSSES, GRADIENTS, PARAMETERS = 1e-6, 1e-5, 1e-4
NOISE = 1e-8  # norms of gradients that are zero in exact arithmetic
STAGES = ("zero1", "zero2", "zero3")
PLAIN = [f"{policy}-{stage}-plain" for policy in CASES for stage in STAGES]
MORE = [
    *(f"pi05-{stage}-adding_up" for stage in STAGES),
    *(f"pi05-{stage}-scheduled" for stage in ("zero2", "zero3")),
    *(f"pi05-zero2-{way}" for way in ("to_zero3", "to_fsdp2", "forgetting", "dropping", "decayed")),
    *(f"pi05-zero3-{way}" for way in ("recomputed", "untold", "decayed")),
]


def run_ranks(num_ranks: int, folder: Path, labels: list[str]) -> Mapping[str, Any]:
    """What each label came to."""
    script = Path(__file__).with_name("zero_rank.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    command = [sys.executable, *launcher, str(script), str(folder), *labels]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "shm_comm" not in done.stdout, "an extension was compiled"
    return {label: torch.load(folder / f"{label}.pt", weights_only=False) for label in labels}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    return run_ranks(2, tmp_path_factory.mktemp("two"), [*PLAIN, *MORE])


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    return run_ranks(4, tmp_path_factory.mktemp("four"), PLAIN)


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], dict[str, Any]]:
    return {(policy, count): vars(train_alone(case, count)) for policy, case in CASES.items() for count in (2, 4)}


def require_equal(got: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Losses, norms and gradients, with None where the reference has None, and parameters after all steps."""
    assert got["losses"] == pytest.approx(expected["losses"], rel=LOSSES)
    assert got["norms"] == pytest.approx(expected["norms"], rel=GRADIENTS)
    assert got["gradients"].keys() == expected["gradients"].keys()
    noise = set()
    for name, reference in expected["gradients"].items():
        gradient = got["gradients"][name]
        assert (gradient is None) == (reference is None), name
        if reference is not None and 0 < reference.norm() < NOISE:
            noise.add(name)
        elif reference is not None:
            assert (gradient - reference).norm() <= GRADIENTS * reference.norm(), name
    assert all(name.endswith(("k_proj.bias", "to_k.bias")) for name in noise)
    for name in expected["parameters"].keys() - noise:
        reference = expected["parameters"][name]
        tolerance = 0 if expected["gradients"][name] is None else PARAMETERS
        assert (got["parameters"][name] - reference).norm() <= tolerance * reference.norm(), name


@needs_deepspeed
@pytest.mark.slow
class TestTwoRanks:
    @pytest.mark.parametrize("label", [*PLAIN, "pi05-zero3-recomputed"])
    def test_trains_as_one_process(self, two_ranks, alone, label):
        require_equal(two_ranks[label], alone[label.partition("-")[0], 2])

    @pytest.mark.parametrize("label", ["pi05-zero3-untold", "pi05-zero2-decayed", "pi05-zero3-decayed"])
    def test_what_is_wrong_is_noticed(self, two_ranks, alone, label):
        with pytest.raises(AssertionError):
            require_equal(two_ranks[label], alone["pi05", 2])

    @pytest.mark.parametrize("policy", CASES)
    def test_each_rank_holds_a_part(self, two_ranks, policy):
        placed = {stage: two_ranks[f"{policy}-{stage}-plain"]["placed"] for stage in STAGES}
        total = placed["zero1"]["total"]
        assert placed["zero1"]["held"] == placed["zero2"]["held"] == total
        assert placed["zero3"]["held"] < 0.55 * total
        for found in placed.values():  # half of two moments and of the weights in float32
            assert found["optimizer"] == pytest.approx(1.5 * total, rel=0.01)

    @pytest.mark.parametrize("stage", STAGES)
    def test_gradients_of_micro_batches_add_up(self, two_ranks, alone, stage):
        got = two_ranks[f"pi05-{stage}-adding_up"]["losses"]
        assert got == pytest.approx(alone["pi05", 4]["losses"], rel=LOSSES)

    def test_gradients_that_do_not_add_up_are_noticed(self, two_ranks, alone):
        assert two_ranks["pi05-zero2-dropping"]["losses"] != pytest.approx(alone["pi05", 4]["losses"], rel=LOSSES)

    @pytest.mark.parametrize("target", ["to_zero3", "to_fsdp2"])
    def test_the_state_goes_on_under_another_strategy(self, two_ranks, alone, target):
        got = two_ranks[f"pi05-zero2-{target}"]
        assert got["losses"] == pytest.approx(alone["pi05", 2]["losses"], rel=LOSSES)
        assert got["held"] == pytest.approx(0.5, abs=0.02)

    def test_a_forgotten_state_is_noticed(self, two_ranks, alone):
        assert two_ranks["pi05-zero2-forgetting"]["losses"] != pytest.approx(alone["pi05", 2]["losses"], rel=LOSSES)

    @pytest.mark.parametrize("stage", ["zero2", "zero3"])
    def test_the_schedule_decides_and_hooks_come_first(self, two_ranks, stage):
        got = two_ranks[f"pi05-{stage}-scheduled"]
        assert got["same"] and got["moved"]
        assert got["called"] == [True, False]
        assert got["lr"] == 1e-3


@needs_deepspeed
@pytest.mark.slow
class TestFourRanks:
    @pytest.mark.parametrize("label", PLAIN)
    def test_trains_as_one_process(self, four_ranks, alone, label):
        require_equal(four_ranks[label], alone[label.partition("-")[0], 4])

    @pytest.mark.parametrize("policy", CASES)
    def test_each_rank_holds_a_part(self, four_ranks, policy):
        placed = four_ranks[f"{policy}-zero3-plain"]["placed"]
        assert placed["held"] < 0.3 * placed["total"]


def traits(**changes: Any) -> RunTraits:
    """A run that every stage can train."""
    plain: dict[str, Any] = {
        "support": PolicySupport("act"),
        "packed": True,
        "packing": "padding_free",
        "composes": False,
        "precision": "none",
        "adapters": False,
        "mixture": False,
        "streaming": False,
        "device": "cpu",
        "batch_size": 4,
    }
    return RunTraits(**(plain | changes))


class TestFaults:
    @pytest.fixture
    def strategy(self) -> Any:
        pytest.importorskip("deepspeed")
        from embodix_deepspeed.strategies import Zero2Strategy

        return Zero2Strategy()

    def test_none_for_a_plain_run(self, strategy):
        assert list(strategy.faults(traits(), RankLayout(data=2))) == []

    def test_low_precision(self, strategy):
        (fault,) = strategy.faults(traits(precision="torchao"), RankLayout(data=2))
        assert fault.startswith("parallel=zero2 ") and "got precision=torchao. Choose precision=none" in fault

    def test_accelerates_autocast(self, strategy, monkeypatch):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        (fault,) = strategy.faults(traits(), RankLayout(data=2))
        assert "got mixed_precision=bf16" in fault

    def test_one_process(self, strategy):
        with pytest.raises(ValueError, match="cuts across 2 processes at least; 1 was started"):
            strategy.layout(1)

    def test_parameters_in_half_precision(self):
        pytest.importorskip("deepspeed")
        from embodix_deepspeed.placement import require_float32

        with pytest.raises(ValueError, match=r"got some in torch\.bfloat16"):
            require_float32(torch.nn.Linear(2, 2, dtype=torch.bfloat16), 2)
