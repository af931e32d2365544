# SPDX-License-Identifier: Apache-2.0
"""RLinf's environment worker."""

from __future__ import annotations

from typing import Any

from embodix_rl.rlinf.extension import activate

activate("env")  # before RLinf's modules are imported, hence the order below

from rlinf.workers.env.env_worker import EnvWorker  # noqa: E402

from embodix_rl.rlinf.workers.reporting import ReportingWorker  # noqa: E402


class TimedEnvironments(ReportingWorker):
    """Records steps and resets."""

    def env_interact_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.timeline_span("step"):
            return super().env_interact_step(*args, **kwargs)  # type: ignore[misc]

    def bootstrap_step(self) -> Any:
        with self.timeline_span("reset"):
            return super().bootstrap_step()  # type: ignore[misc]


class EmbodixEnvWorker(TimedEnvironments, EnvWorker):
    """``EnvWorker`` with report and timeline."""
