# SPDX-License-Identifier: Apache-2.0
"""A pipeline trains as one process does on the same micro-batches; what can't go through one is refused in words."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_cases import SOUND_RUN
from pipeline_cases import DEPTH, installed, train_alone

from embodix import plugins
from embodix.contracts import RunTraits
from embodix.parallel.stage_cut import PartCost, balanced_cut
from embodix.policies.support import support_of
from embodix_pi05.stages import Pi05Stages

LOSSES, GRADIENTS, PARAMETERS = 1e-6, 1e-5, 1e-4
NOISE = 1e-6  # norm of a gradient that is mathematically zero: of biases of key projections
NUM_PARAMETERS = 133


def pipeline(**options: Any) -> Any:
    return plugins.build("parallel_strategies", "pipeline", options)


TRAITS = replace(SOUND_RUN, packing="sequence_length", composes=True, bins_per_step=4, num_shapes=1)


def test_the_processes_are_stages_then_copies() -> None:
    layout = pipeline(size=2).layout(8)
    assert (layout.data, layout.pipeline, layout.num_batches) == (4, 2, 4)
    assert [layout.batch_index(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert pipeline().layout(4).pipeline == 4
    with pytest.raises(ValueError, match=r"size divides the number of processes; got 3 for 4. Take one of 1, 2, 4"):
        pipeline(size=3).layout(4)


@pytest.mark.parametrize(
    ("traits", "told"),
    [
        (replace(TRAITS, packing="padding_free", num_shapes=None), "got packing=padding_free. Choose packing=sequence"),
        (replace(TRAITS, num_shapes=4), "got packing.options.num_shapes=4. Set it to 1"),
        (replace(TRAITS, bins_per_step=1), "got packing.options.bins_per_step=1. Set it to 2 or more"),
        (replace(TRAITS, precision="fp8"), "got precision=fp8. Choose precision=none"),
        (replace(TRAITS, support=support_of("groot")), "GR00T-N1.5's names none. Choose parallel=fsdp2"),
    ],
)
def test_what_a_pipeline_can_not_train_is_refused(traits: RunTraits, told: str) -> None:
    strategy = pipeline()
    assert not list(strategy.faults(TRAITS, strategy.layout(2)))
    (fault,) = strategy.faults(traits, strategy.layout(2))
    assert told in fault


def test_one_stage_is_refused() -> None:
    (fault,) = pipeline().faults(TRAITS, pipeline().layout(1))
    assert "has 2 stages at least; got 1" in fault


def test_a_heavy_entry_leaves_the_first_stage_fewer_layers() -> None:
    layers, nothing = [PartCost(10, 10)] * 8, PartCost(0, 0)
    assert [len(own) for own in balanced_cut(nothing, layers, nothing, 2)] == [4, 4]
    assert [len(own) for own in balanced_cut(PartCost(40, 40), layers, nothing, 2)] == [2, 6]
    assert [len(own) for own in balanced_cut(nothing, layers, PartCost(40, 40), 2)] == [6, 2]
    with pytest.raises(ValueError, match=r"got 3 stages for 2 layers. Set parallel.options.size to 2 or less"):
        balanced_cut(nothing, layers[:2], nothing, 3)


@pytest.mark.parametrize("num_stages", [2, 3, DEPTH])
def test_every_parameter_is_in_one_stage(num_stages: int) -> None:
    policy, _ = installed(lambda count: count)
    held = Pi05Stages(policy, num_stages).parameters
    names = [name for own in held for name in own]
    assert len(names) == len(set(names)) == NUM_PARAMETERS
    assert set(names) == {name for name, _ in policy.named_parameters()}


def run_ranks(num_ranks: int, folder: Path, *labels: str) -> Mapping[str, Any]:
    script = Path(__file__).with_name("pipeline_rank.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    command = [sys.executable, *launcher, str(script), str(folder), *labels]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.stem: torch.load(path, weights_only=False) for path in folder.glob("*.pt")}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    return run_ranks(2, tmp_path_factory.mktemp("two"), "lost_condition", "recomputed", "stages_2")


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    return run_ranks(4, tmp_path_factory.mktemp("four"), "stages_4", "stages_2")


@pytest.fixture(scope="module")
def alone() -> dict[int, dict[str, Any]]:
    return {num_batches: vars(train_alone(num_batches)) for num_batches in (1, 2)}


def require_equal(got: Mapping[str, Any], reference: Mapping[str, Any]) -> None:
    """Losses, norms and gradients, with None where the reference has None, and parameters after all steps."""
    assert got["losses"] == pytest.approx(reference["losses"], rel=LOSSES)
    assert got["norms"] == pytest.approx(reference["norms"], rel=GRADIENTS)
    assert len(reference["gradients"]) == NUM_PARAMETERS and got["gradients"].keys() == reference["gradients"].keys()
    noise = set()
    for name, expected in reference["gradients"].items():
        gradient = got["gradients"][name]
        assert (gradient is None) == (expected is None), name
        if expected is not None and 0 < expected.norm() < NOISE:
            noise.add(name)
        elif expected is not None:
            assert (gradient - expected).norm() <= GRADIENTS * expected.norm(), name
    assert all(name.endswith("k_proj.bias") for name in noise) and len(noise) == 2
    assert got["parameters"].keys() == reference["parameters"].keys()
    for name in reference["parameters"].keys() - noise:
        expected = reference["parameters"][name]
        assert (got["parameters"][name] - expected).norm() <= PARAMETERS * expected.norm(), name


def require_stages_apart(done: Mapping[str, Any], num_copies: int) -> None:
    total = done["ranks"][0]["total"]
    assert sum(rank["held"] for rank in done["ranks"]) == num_copies * total
    assert all(0 < rank["held"] < 0.6 * total for rank in done["ranks"])
    assert all(0 < rank["optimizer"] < 0.6 * 2 * total for rank in done["ranks"])


def require_taken_back(done: Mapping[str, Any]) -> None:
    assert len(done["before"]) == 375 and done["after"].keys() == done["before"].keys()
    assert all(torch.equal(done["after"][key], value) for key, value in done["before"].items())


@pytest.mark.slow
class TestTraining:
    @pytest.mark.parametrize("label", ["stages_2", "recomputed"])
    def test_two_stages_train_as_one_process(self, two_ranks, alone, label) -> None:
        require_equal(two_ranks[label], alone[1])

    def test_a_lost_gradient_of_the_condition_is_noticed(self, two_ranks, alone) -> None:
        with pytest.raises(AssertionError):
            require_equal(two_ranks["lost_condition"], alone[1])
        got, expected = two_ranks["lost_condition"]["gradients"], alone[1]["gradients"]
        wrong = {
            name for name in expected if expected[name] is not None and not torch.allclose(got[name], expected[name])
        }
        assert {name.split(".")[1] for name in wrong} == {"time_mlp_in", "time_mlp_out"}

    def test_four_stages_train_as_one_process(self, four_ranks, alone) -> None:
        require_equal(four_ranks["stages_4"], alone[1])

    def test_copies_of_two_stages_train_as_one_process(self, four_ranks, alone) -> None:
        require_equal(four_ranks["stages_2"], alone[2])

    def test_every_rank_holds_its_stage_alone(self, two_ranks) -> None:
        require_stages_apart(two_ranks["stages_2"], 1)
        assert two_ranks["stages_2"]["strategy"] == "pipeline (1F1B), layers 0-0 | 1-3"

    def test_four_ranks_hold_their_stages_alone(self, four_ranks) -> None:
        require_stages_apart(four_ranks["stages_4"], 1)
        require_stages_apart(four_ranks["stages_2"], 2)

    def test_the_optimizers_state_is_saved_in_parts_and_taken_back(self, two_ranks) -> None:
        require_taken_back(two_ranks["checkpoint"])

    def test_four_ranks_take_the_optimizers_state_back(self, four_ranks) -> None:
        require_taken_back(four_ranks["checkpoint"])

    def test_micro_batches_of_two_shapes_are_refused(self, two_ranks) -> None:
        assert "have one shape; got [(20, 32), " in two_ranks["refused"]
        assert two_ranks["refused"].endswith("Set packing.options.num_shapes=1.")
