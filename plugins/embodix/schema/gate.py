# SPDX-License-Identifier: Apache-2.0
"""Schema of the accuracy gate: the config's ``gate`` node, and what ``embodix.quantization.accuracy_gate`` is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class AccuracyGateSettings:
    """How a policy is compared with its low-precision self.

    Attributes:
        num_samples: held-out samples, from two episodes at least.
        batch_size: samples that are computed together.
        seed: of the noise and the times, the same for every variant.
        dataset_root: folder of the data set; null for the run's own.
        thresholds: rule -> a number or a formula in its place, for example ``+gate.thresholds.chunk_cosine=0.9995``;
            see ``embodix.quantization.gate_rules``.
    """

    num_samples: int = 64
    batch_size: int = 16
    seed: int = 0
    dataset_root: str | None = None
    thresholds: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_samples < 2:
            raise ValueError(
                f"gate.num_samples must be at least 2, from 2 episodes or more: one observation says nothing of the "
                f"others. Got {self.num_samples}."
            )
        if self.batch_size < 1:
            raise ValueError(f"gate.batch_size must be at least 1; got {self.batch_size}.")
