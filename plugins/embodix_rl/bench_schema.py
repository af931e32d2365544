# SPDX-License-Identifier: Apache-2.0
"""What ``lerobot bench rl`` compares: the node ``bench`` of a config of ``lerobot rl``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class BenchSettings:
    """What is run one after another, and how the report shows it. `lerobot rl` ignores it.

    Attributes:
        title: of the report.
        variants: name -> overrides of `lerobot rl`, in the order in which they run. The first is the baseline.
        against: variant -> its baseline, for those whose baseline is another.
        only: the variants to run; null for all.
        paper: variant -> the ratio to its baseline that a paper measured, on its own hardware.
        paper_source: where these stand, and with what they were measured.
        timeline_s: seconds of the timelines; null for two training steps of the baseline.
        timeout_s: the longest that a variant may take.
        resume: folder of an earlier bench; its finished variants are not run again where their config is the same.
    """

    title: str = "Schedules of reinforcement learning"
    variants: dict[str, list[str]] = field(default_factory=dict)
    against: dict[str, str] = field(default_factory=dict)
    only: list[str] | None = None
    paper: dict[str, float] = field(default_factory=dict)
    paper_source: str | None = None
    timeline_s: float | None = None
    timeout_s: float = 3600.0
    resume: str | None = None
