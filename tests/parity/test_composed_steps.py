# SPDX-License-Identifier: Apache-2.0
"""The gradient of a step is that of its samples, however they are packed."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from embodix.attention.cpu import SegmentAuto
from embodix.packing.layout import PaddedPacker, PaddingFreePacker
from embodix.policies.settings import FastPathSettings
from embodix.testing.errors import compare_gradients, gradients_of
from embodix_pi05.testing import (
    ACTION_DIMS,
    VALID_STEPS,
    StepResult,
    draw_by_sample,
    run_step,
    seven_samples,
    small_pi05,
    upstream_losses,
)
from embodix_pi05.wrapper import Pi05Wrapper

RANK_SCRIPT = Path(__file__).with_name("composed_step_rank.py")
ALL = tuple(range(7))
PACKINGS = {
    "one bin, padded": ((ALL,), PaddedPacker()),
    "one bin, another order": ((ALL[::-1],), PaddingFreePacker()),
    "three uneven micro-batches": (((4, 0, 6, 2), (1,), (5, 3)), PaddingFreePacker()),
    "every sample by itself": (tuple((sample,) for sample in ALL), PaddingFreePacker()),
    "two padded micro-batches": (((0, 1, 2, 3, 4), (5, 6)), PaddedPacker()),
}


@cache
def reference(action_pad: str, with_dims: bool) -> tuple[float, dict[str, torch.Tensor | None]]:
    """Upstream's own unreduced losses of all samples, reduced to the mean over the elements that count."""
    policy = small_pi05()
    batch = seven_samples(policy, with_dims)
    draw_by_sample(policy, [ALL])
    losses = upstream_losses(policy, batch)[..., :4]
    valid = torch.ones_like(losses, dtype=torch.bool)
    for sample in ALL:
        if action_pad == "mask":
            valid[sample, VALID_STEPS[sample] :] = False
        if with_dims:
            valid[sample, :, ACTION_DIMS[sample] :] = False
    loss = losses[valid].sum() / valid.sum()
    loss.backward()
    return loss.item(), gradients_of(policy)


def assert_same_step(result: StepResult, action_pad: str, with_dims: bool, tolerance: float = 1e-6) -> None:
    loss, gradients = reference(action_pad, with_dims)
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.logged["loss"] == pytest.approx(loss, rel=1e-6)
    comparison = compare_gradients(result.gradients, gradients)
    assert comparison.structure == []
    assert comparison.whole <= tolerance, comparison
    assert comparison.worst <= 1e-5, comparison


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(
    ("action_pad", "with_dims"), [("host", False), ("mask", False), ("host", True), ("mask", True)]
)
def test_the_gradient_does_not_depend_on_the_packing(packing: str, action_pad: str, with_dims: bool) -> None:
    bins, packer = PACKINGS[packing]
    assert_same_step(run_step(bins, packer, action_pad=action_pad, with_dims=with_dims), action_pad, with_dims)


def test_without_the_count_of_the_step_it_does() -> None:
    """Mutation twin: each micro-batch divided by its own count, as a plain mean would be."""
    bins, packer = PACKINGS["three uneven micro-batches"]
    result = run_step(bins, packer, count=lambda own: own * len(bins))
    comparison = compare_gradients(result.gradients, reference("mask", True)[1])
    assert comparison.whole > 1e-2
    with pytest.raises(AssertionError):
        assert_same_step(result, "mask", True)


def test_what_is_logged_is_of_the_whole_step() -> None:
    whole = run_step((ALL,), PaddingFreePacker(), with_dims=False)
    split = run_step(((4, 0, 6, 2), (1,), (5, 3)), PaddingFreePacker(), with_dims=False)
    assert split.logged["loss_per_dim"] == pytest.approx(whole.logged["loss_per_dim"], rel=1e-5)
    same = ("valid", "images_computed", "action_valid", "action_total")
    assert [getattr(split.token_counts, name) for name in same] == [getattr(whole.token_counts, name) for name in same]


@pytest.mark.parametrize("poisoned", [0, 3, 6])
def test_a_samples_loss_does_not_depend_on_its_neighbours(poisoned: int) -> None:
    """Bit by bit, with NaN in every input of another sample of the pack."""
    losses = []
    for poison in (False, True):
        policy = small_pi05()
        settings = FastPathSettings(PaddingFreePacker(), SegmentAuto(), action_pad="mask", uneven_batches=True)
        Pi05Wrapper().install(policy, settings)
        batch = seven_samples(policy, with_dims=True)
        draw_by_sample(policy, [ALL])
        if poison:
            for key in ("observation.images.front", "observation.images.gripper", "action"):
                batch[key][poisoned] = float("nan")
        losses.append(policy.forward(batch, reduction="none")[0])
    others = [sample for sample in ALL if sample != poisoned]
    assert torch.equal(losses[0][others], losses[1][others])
    assert losses[1][poisoned].isnan()


@pytest.mark.slow
def test_two_ranks_with_micro_batches_have_the_gradient_of_all(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*launcher, str(RANK_SCRIPT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    whole = dataclasses.asdict(run_step((ALL,), PaddingFreePacker()).token_counts)
    for action_pad in ("host", "mask"):
        wanted = reference(action_pad, True)
        for rank in ranks:
            result = rank[action_pad]
            assert result["loss"] == pytest.approx(wanted[0], rel=1e-6), "every rank reports the step's loss"
            assert result["token_counts"]["valid"] == whole["valid"]
            used = [name for name, gradient in wanted[1].items() if gradient is not None]
            got = {name: result["gradients"][name] for name in used}
            comparison = compare_gradients(got, {name: wanted[1][name] for name in used})
            assert comparison.whole <= 1e-6, comparison
