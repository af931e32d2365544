# SPDX-License-Identifier: Apache-2.0
"""RLinf's environment workers, of synchronous and asynchronous runs."""

from __future__ import annotations

from typing import Any

from embodix_rl.rlinf.extension import ReportingWorker, activate

activate("env")  # before RLinf's modules are imported, hence the order below

from rlinf.workers.env.async_env_worker import AsyncEnvWorker  # noqa: E402
from rlinf.workers.env.env_worker import EnvWorker  # noqa: E402


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


class EmbodixAsyncEnvWorker(TimedEnvironments, AsyncEnvWorker):
    """``AsyncEnvWorker`` with report and timeline."""
