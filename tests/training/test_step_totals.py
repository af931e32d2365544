# SPDX-License-Identifier: Apache-2.0
"""One step over two ranks: a mean of losses, sums of counts, and one broken rank breaks both."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from embodix.policies.settings import TokenCounts
from embodix.training.step_totals import StepTotals

OWN = StepTotals(1.0, 3.0, 4, TokenCounts(10, 12, 20, 3, 4, 30, 40))
OTHER = StepTotals(2.0, 3.0, 2, TokenCounts(1, 2, 3, 4, 5, 6, 7))


@dataclass
class TwoRanks:
    """The accelerator of a rank, with what the other one has."""

    other: StepTotals
    num_processes: int = 2
    state = SimpleNamespace(num_processes=2)
    device = torch.device("cpu")

    def reduce(self, row: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        counted = () if self.other.counts is None else dataclasses.astuple(self.other.counts)
        flags = (float(not self.other.finite), float(self.other.interrupted))
        return row + torch.tensor([self.other.loss, *flags, self.other.num_samples, *counted], dtype=row.dtype)


def _both(own: StepTotals, other: StepTotals, already_total: bool = False, num_batches: int = 2) -> StepTotals:
    accelerator: Any = TwoRanks(other, num_batches)
    return own.over_ranks(accelerator, already_total)


def test_losses_are_averaged_and_counts_added() -> None:
    assert _both(OWN, OTHER) == StepTotals(1.5, 3.0, 6, TokenCounts(11, 14, 23, 7, 9, 36, 47))


def test_what_nothing_counts_stays_unknown() -> None:
    uncounted = [dataclasses.replace(totals, counts=None) for totals in (OWN, OTHER)]
    assert _both(*uncounted).counts is None
    assert _both(*uncounted).token_record() is None


def test_a_composed_step_is_total_already() -> None:
    assert _both(OWN, OWN, already_total=True) == OWN


@pytest.mark.parametrize("already_total", [False, True])
@pytest.mark.parametrize("flag", [{"finite": False}, {"interrupted": True}])
def test_what_one_rank_finds_holds_for_both(flag: dict[str, bool], already_total: bool) -> None:
    flagged = dataclasses.replace(OTHER, **flag)
    for both in (_both(OWN, flagged, already_total), _both(flagged, OWN, already_total)):
        assert {name: getattr(both, name) for name in flag} == flag
    assert _both(OWN, OTHER, already_total).finite and not _both(OWN, OTHER, already_total).interrupted


def test_a_broken_loss_of_the_other_rank_is_seen_in_the_mean() -> None:
    broken = dataclasses.replace(OTHER, loss=float("nan"), finite=False)
    assert not _both(OWN, broken).finite
    assert _both(OWN, broken).loss != _both(OWN, broken).loss


def test_one_process_keeps_its_own_to_the_bit() -> None:
    alone: Any = TwoRanks(OTHER, num_processes=1)
    alone.state = SimpleNamespace(num_processes=1)
    assert OWN.over_ranks(alone, already_total=False) is OWN


def test_ranks_that_share_samples_count_them_once_and_end_together() -> None:
    """Ctrl-C reaches them in different steps."""
    pressed = dataclasses.replace(OWN, interrupted=True)
    assert _both(OWN, pressed, num_batches=1) == pressed
    assert _both(pressed, OWN, num_batches=1) == pressed
