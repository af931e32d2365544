# SPDX-License-Identifier: Apache-2.0
"""What every worker of a run can tell the driver."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

from embodix_rl.report.spans import TimelineWriter
from embodix_rl.rlinf.extension import report


class ReportingWorker:
    """Mixin for RLinf's workers: what is in force, and a timeline of what they do."""

    def embodix_report(self) -> dict[str, Any]:
        """`embodix_rl.rlinf.extension.WorkerReport` as plain containers."""
        worker: Any = self
        return report(worker._group_name, worker._rank, str(worker.torch_device_type))

    def timeline_span(self, activity: str) -> AbstractContextManager[None]:
        """Record what a block takes."""
        return self._timeline.span(activity)

    @cached_property
    def _timeline(self) -> TimelineWriter:
        worker: Any = self
        return TimelineWriter(worker.cfg.embodix.timeline, f"{worker._group_name}:{worker._rank}")
