# SPDX-License-Identifier: Apache-2.0
"""What the ranks of one optimizer step came to together, exchanged once between backward and the optimizer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from embodix.policies.settings import TokenCounts
from embodix.report.steps import TokenRecord
from embodix.training.step_forward import over_ranks


@dataclass(frozen=True)
class StepTotals:
    """One step, of one rank or of all.

    Attributes:
        loss: mean over ranks.
        grad_norm: the same on every rank, since gradients are exchanged before.
        num_samples: sum over ranks.
        counts: sums over ranks, None where nothing counts them.
        finite: whether loss, gradient norm, states and actions are, on every rank.
        interrupted: whether some rank was asked to end.
    """

    loss: float
    grad_norm: float
    num_samples: int
    counts: TokenCounts | None
    interrupted: bool = False
    finite: bool = True

    def token_record(self) -> TokenRecord | None:
        """The token and image counts, as the record of a step keeps them."""
        if self.counts is None:
            return None
        return TokenRecord(
            valid=self.counts.valid,
            computed=self.counts.computed,
            upstream=self.counts.upstream,
            images_computed=self.counts.images_computed,
            images_upstream=self.counts.images_upstream,
        )

    def over_ranks(self, accelerator: Accelerator, already_total: bool) -> StepTotals:
        """Those of all ranks; every rank must ask.

        Args:
            already_total: loss, samples and counts are those of all ranks, as a composed step's are.
        """
        if accelerator.state.num_processes == 1:
            return self
        counted = () if self.counts is None else dataclasses.astuple(self.counts)
        row = [self.loss, float(not self.finite), float(self.interrupted), float(self.num_samples), *counted]
        # Reduced in double precision, where counts are exact.
        sums = over_ranks(torch.tensor(row, dtype=torch.float64), accelerator, "sum").tolist()
        loss, broken, interrupted, num_samples, *counts = sums
        both = dataclasses.replace(self, finite=broken == 0, interrupted=interrupted > 0)
        if already_total:
            return both
        return dataclasses.replace(
            both,
            loss=loss / accelerator.num_processes,
            num_samples=int(num_samples),
            counts=TokenCounts(*map(int, counts)) if counted else None,
        )
