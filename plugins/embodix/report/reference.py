# SPDX-License-Identifier: Apache-2.0
"""What a variant is held to where upstream's own batch is wrong.

Upstream's GR00T-N1.5 attends to the padding of shorter prompts, so the loss of a batch depends on which samples happen
to share it. A fast path that computes each sample alone can't agree with that, and should not: its reference is
upstream run one sample at a time, on the same weights, samples, noise and times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ReferenceDifference:
    """Relative loss differences from the reference, measured once on a batch of the run.

    Attributes:
        reference: the reference in words, e.g. ``upstream run one sample at a time``.
        cause: why upstream's own batch is not the reference, one clause.
        variant: of the variant.
        host_batch: of upstream's own batch.
    """

    reference: str
    cause: str
    variant: float
    host_batch: float

    @classmethod
    def from_manifest(cls, recorded: Mapping[str, Any] | None) -> ReferenceDifference | None:
        """Read a manifest's ``reference_check``."""
        if recorded is None:
            return None
        return cls(
            reference=str(recorded["reference"]),
            cause=str(recorded["cause"]),
            variant=float(recorded["fast_difference"]),
            host_batch=float(recorded["host_batch_difference"]),
        )
